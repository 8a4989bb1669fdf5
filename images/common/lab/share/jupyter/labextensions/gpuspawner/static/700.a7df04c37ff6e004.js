"use strict";(self.rspackChunkgpuspawner=self.rspackChunkgpuspawner||[]).push([[700],{646(e,r,n){var o=n(601),t=n.n(o),a=n(314),p=(n.n(a))()(t());p.push([e.id,`.gpuspawner-item button {
  height: 100%;
  padding: 0 4px;
  border: none;
  background: none;
  color: inherit;
  font: inherit;
  cursor: pointer;
  white-space: nowrap;
}

.gpuspawner-item button:hover {
  background: var(--jp-layout-color3);
}

.gpuspawner-item button:focus-visible {
  outline: 2px solid var(--jp-brand-color1);
  outline-offset: -2px;
}

.gpuspawner-item span + span::before {
  content: ' \xb7 ';
}

.gpuspawner-item .gpuspawner-warned {
  background: var(--jp-warn-color2);
  color: #000;
}

@media (max-width: 700px) {
  .gpuspawner-part-memory,
  .gpuspawner-part-credits {
    display: none;
  }
}

.gpuspawner-panel {
  box-sizing: border-box;
  min-width: 220px;
  padding: 12px;
  overflow: auto;
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-size: var(--jp-ui-font-size1);
}

.gpuspawner-panel h2 {
  margin: 0 0 8px;
  font-size: var(--jp-ui-font-size2);
}

.gpuspawner-panel h3 {
  margin: 12px 0 4px;
  font-size: var(--jp-ui-font-size1);
}

.gpuspawner-panel p {
  margin: 0 0 8px;
  line-height: 1.4;
}

.gpuspawner-panel a {
  color: var(--jp-content-link-color);
}

.gpuspawner-warning {
  padding: 6px 8px;
  border-left: 3px solid var(--jp-warn-color1);
  background: var(--jp-layout-color2);
}

.gpuspawner-meter {
  margin-bottom: 6px;
}

.gpuspawner-row {
  display: flex;
  justify-content: space-between;
  gap: 8px;
  margin-bottom: 2px;
}

.gpuspawner-key::before {
  content: '';
  display: inline-block;
  width: 10px;
  height: 3px;
  margin-right: 6px;
  vertical-align: middle;
  background: currentColor;
}

.gpuspawner-key.gpuspawner-use::before,
.gpuspawner-bar.gpuspawner-use div {
  background: var(--jp-brand-color1);
}

.gpuspawner-key.gpuspawner-memory::before,
.gpuspawner-bar.gpuspawner-memory div {
  background: var(--jp-success-color1);
}

.gpuspawner-bar {
  height: 6px;
  border-radius: 3px;
  background: var(--jp-layout-color3);
  overflow: hidden;
}

.gpuspawner-bar div {
  height: 100%;
}

.gpuspawner-panel figure {
  margin: 8px 0 12px;
}

.gpuspawner-panel figcaption {
  color: var(--jp-ui-font-color2);
}

.gpuspawner-curve {
  display: block;
  width: 100%;
  max-width: 480px;
}

.gpuspawner-curve text {
  fill: var(--jp-ui-font-color2);
  font-size: 8px;
}

.gpuspawner-grid {
  stroke: var(--jp-border-color2);
  stroke-width: 0.5;
}

.gpuspawner-line {
  fill: none;
  stroke-width: 1.5;
  stroke-linejoin: round;
}

polyline.gpuspawner-use {
  stroke: var(--jp-brand-color1);
}

polyline.gpuspawner-memory {
  stroke: var(--jp-success-color1);
}

.gpuspawner-panel dl {
  display: grid;
  grid-template-columns: auto 1fr;
  gap: 4px 12px;
  margin: 0 0 12px;
}

.gpuspawner-panel dt {
  color: var(--jp-ui-font-color2);
}

.gpuspawner-panel dd {
  margin: 0;
}

.gpuspawner-buttons {
  display: flex;
  flex-wrap: wrap;
  gap: 8px;
  margin-bottom: 12px;
}

.gpuspawner-buttons[hidden],
.gpuspawner-buttons button[hidden] {
  display: none;
}
`,""]),n.d(r,{},{A:p})},314(e){e.exports=function(e){var r=[];return r.toString=function(){return this.map(function(r){var n="",o=void 0!==r[5];return r[4]&&(n+="@supports (".concat(r[4],") {")),r[2]&&(n+="@media ".concat(r[2]," {")),o&&(n+="@layer".concat(r[5].length>0?" ".concat(r[5]):""," {")),n+=e(r),o&&(n+="}"),r[2]&&(n+="}"),r[4]&&(n+="}"),n}).join("")},r.i=function(e,n,o,t,a){"string"==typeof e&&(e=[[null,e,void 0]]);var p={};if(o)for(var i=0;i<this.length;i++){var s=this[i][0];null!=s&&(p[s]=!0)}for(var u=0;u<e.length;u++){var c=[].concat(e[u]);o&&p[c[0]]||(void 0!==a&&(void 0===c[5]||(c[1]="@layer".concat(c[5].length>0?" ".concat(c[5]):""," {").concat(c[1],"}")),c[5]=a),n&&(c[2]&&(c[1]="@media ".concat(c[2]," {").concat(c[1],"}")),c[2]=n),t&&(c[4]?(c[1]="@supports (".concat(c[4],") {").concat(c[1],"}"),c[4]=t):c[4]="".concat(t)),r.push(c))}},r}},601(e){e.exports=function(e){return e[1]}},72(e){var r=[];function n(e){for(var n=-1,o=0;o<r.length;o++)if(r[o].identifier===e){n=o;break}return n}function o(e,o){for(var t={},a=[],p=0;p<e.length;p++){var i=e[p],s=o.base?i[0]+o.base:i[0],u=t[s]||0,c="".concat(s," ").concat(u);t[s]=u+1;var l=n(c),d={css:i[1],media:i[2],sourceMap:i[3],supports:i[4],layer:i[5]};if(-1!==l)r[l].references++,r[l].updater(d);else{var g=function(e,r){var n=r.domAPI(r);return n.update(e),function(r){r?(r.css!==e.css||r.media!==e.media||r.sourceMap!==e.sourceMap||r.supports!==e.supports||r.layer!==e.layer)&&n.update(e=r):n.remove()}}(d,o);o.byIndex=p,r.splice(p,0,{identifier:c,updater:g,references:1})}a.push(c)}return a}e.exports=function(e,t){var a=o(e=e||[],t=t||{});return function(e){e=e||[];for(var p=0;p<a.length;p++){var i=n(a[p]);r[i].references--}for(var s=o(e,t),u=0;u<a.length;u++){var c=n(a[u]);0===r[c].references&&(r[c].updater(),r.splice(c,1))}a=s}}},659(e){var r={};e.exports=function(e,n){var o=function(e){if(void 0===r[e]){var n=document.querySelector(e);if(window.HTMLIFrameElement&&n instanceof window.HTMLIFrameElement)try{n=n.contentDocument.head}catch(e){n=null}r[e]=n}return r[e]}(e);if(!o)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");o.appendChild(n)}},540(e){e.exports=function(e){var r=document.createElement("style");return e.setAttributes(r,e.attributes),e.insert(r,e.options),r}},56(e,r,n){e.exports=function(e){var r=n.nc;r&&e.setAttribute("nonce",r)}},825(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var r=e.insertStyleElement(e);return{update:function(n){var o,t,a;o="",n.supports&&(o+="@supports (".concat(n.supports,") {")),n.media&&(o+="@media ".concat(n.media," {")),(t=void 0!==n.layer)&&(o+="@layer".concat(n.layer.length>0?" ".concat(n.layer):""," {")),o+=n.css,t&&(o+="}"),n.media&&(o+="}"),n.supports&&(o+="}"),(a=n.sourceMap)&&"u">typeof btoa&&(o+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(a))))," */")),e.styleTagTransform(o,r,e.options)},remove:function(){var e;null===(e=r).parentNode||e.parentNode.removeChild(e)}}}},113(e){e.exports=function(e,r){if(r.styleSheet)r.styleSheet.cssText=e;else{for(;r.firstChild;)r.removeChild(r.firstChild);r.appendChild(document.createTextNode(e))}}},959(e,r,n){var o=n(72),t=n.n(o),a=n(825),p=n.n(a),i=n(659),s=n.n(i),u=n(56),c=n.n(u),l=n(540),d=n.n(l),g=n(113),f=n.n(g),v=n(646),m={};m.styleTagTransform=f(),m.setAttributes=c(),m.insert=s().bind(null,"head"),m.domAPI=p(),m.insertStyleElement=d(),t()(v.A,m),v.A&&v.A.locals&&v.A.locals}}]);