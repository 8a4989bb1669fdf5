"use strict";(self.rspackChunkgpuspawner=self.rspackChunkgpuspawner||[]).push([[700],{646(e,r,n){var a=n(601),o=n.n(a),p=n(314),t=(n.n(p))()(o());t.push([e.id,`.gpuspawner-item button {
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

.gpuspawner-form,
.gpuspawner-told {
  max-width: 30rem;
  line-height: 1.4;
}

.gpuspawner-form p,
.gpuspawner-told p {
  margin: 0 0 8px;
}

.gpuspawner-form [hidden] {
  display: none !important;
}

.gpuspawner-fields {
  display: grid;
  gap: 6px;
  margin: 0 0 12px;
  padding: 0;
  border: none;
}

.gpuspawner-fields legend {
  padding: 0;
  font-weight: 600;
}

.gpuspawner-fields label {
  display: grid;
  grid-template-columns: minmax(0, 2fr) minmax(0, 3fr);
  align-items: center;
  gap: 12px;
}

.gpuspawner-fields span {
  overflow-wrap: anywhere;
}

.gpuspawner-fields input,
.gpuspawner-fields select {
  box-sizing: border-box;
  width: 100%;
  padding: 4px 6px;
  border: 1px solid var(--jp-border-color0);
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color0);
  font: inherit;
}

.gpuspawner-check {
  display: flex;
  align-items: center;
  gap: 8px;
  margin-bottom: 8px;
}

.gpuspawner-check input {
  flex: none;
}

.gpuspawner-form .gpuspawner-meaning {
  margin: -4px 0 8px 24px;
  color: var(--jp-ui-font-color1);
}

.gpuspawner-finish .jp-Dialog-content {
  max-height: 94vh;
}

.gpuspawner-finish .jp-mod-accept[aria-disabled='true'] {
  opacity: 0.5;
  cursor: default;
}

.gpuspawner-told a {
  color: var(--jp-content-link-color);
}
`,""]),n.d(r,{},{A:t})},314(e){e.exports=function(e){var r=[];return r.toString=function(){return this.map(function(r){var n="",a=void 0!==r[5];return r[4]&&(n+="@supports (".concat(r[4],") {")),r[2]&&(n+="@media ".concat(r[2]," {")),a&&(n+="@layer".concat(r[5].length>0?" ".concat(r[5]):""," {")),n+=e(r),a&&(n+="}"),r[2]&&(n+="}"),r[4]&&(n+="}"),n}).join("")},r.i=function(e,n,a,o,p){"string"==typeof e&&(e=[[null,e,void 0]]);var t={};if(a)for(var i=0;i<this.length;i++){var s=this[i][0];null!=s&&(t[s]=!0)}for(var u=0;u<e.length;u++){var l=[].concat(e[u]);a&&t[l[0]]||(void 0!==p&&(void 0===l[5]||(l[1]="@layer".concat(l[5].length>0?" ".concat(l[5]):""," {").concat(l[1],"}")),l[5]=p),n&&(l[2]&&(l[1]="@media ".concat(l[2]," {").concat(l[1],"}")),l[2]=n),o&&(l[4]?(l[1]="@supports (".concat(l[4],") {").concat(l[1],"}"),l[4]=o):l[4]="".concat(o)),r.push(l))}},r}},601(e){e.exports=function(e){return e[1]}},72(e){var r=[];function n(e){for(var n=-1,a=0;a<r.length;a++)if(r[a].identifier===e){n=a;break}return n}function a(e,a){for(var o={},p=[],t=0;t<e.length;t++){var i=e[t],s=a.base?i[0]+a.base:i[0],u=o[s]||0,l="".concat(s," ").concat(u);o[s]=u+1;var c=n(l),d={css:i[1],media:i[2],sourceMap:i[3],supports:i[4],layer:i[5]};if(-1!==c)r[c].references++,r[c].updater(d);else{var g=function(e,r){var n=r.domAPI(r);return n.update(e),function(r){r?(r.css!==e.css||r.media!==e.media||r.sourceMap!==e.sourceMap||r.supports!==e.supports||r.layer!==e.layer)&&n.update(e=r):n.remove()}}(d,a);a.byIndex=t,r.splice(t,0,{identifier:l,updater:g,references:1})}p.push(l)}return p}e.exports=function(e,o){var p=a(e=e||[],o=o||{});return function(e){e=e||[];for(var t=0;t<p.length;t++){var i=n(p[t]);r[i].references--}for(var s=a(e,o),u=0;u<p.length;u++){var l=n(p[u]);0===r[l].references&&(r[l].updater(),r.splice(l,1))}p=s}}},659(e){var r={};e.exports=function(e,n){var a=function(e){if(void 0===r[e]){var n=document.querySelector(e);if(window.HTMLIFrameElement&&n instanceof window.HTMLIFrameElement)try{n=n.contentDocument.head}catch(e){n=null}r[e]=n}return r[e]}(e);if(!a)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");a.appendChild(n)}},540(e){e.exports=function(e){var r=document.createElement("style");return e.setAttributes(r,e.attributes),e.insert(r,e.options),r}},56(e,r,n){e.exports=function(e){var r=n.nc;r&&e.setAttribute("nonce",r)}},825(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var r=e.insertStyleElement(e);return{update:function(n){var a,o,p;a="",n.supports&&(a+="@supports (".concat(n.supports,") {")),n.media&&(a+="@media ".concat(n.media," {")),(o=void 0!==n.layer)&&(a+="@layer".concat(n.layer.length>0?" ".concat(n.layer):""," {")),a+=n.css,o&&(a+="}"),n.media&&(a+="}"),n.supports&&(a+="}"),(p=n.sourceMap)&&"u">typeof btoa&&(a+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(p))))," */")),e.styleTagTransform(a,r,e.options)},remove:function(){var e;null===(e=r).parentNode||e.parentNode.removeChild(e)}}}},113(e){e.exports=function(e,r){if(r.styleSheet)r.styleSheet.cssText=e;else{for(;r.firstChild;)r.removeChild(r.firstChild);r.appendChild(document.createTextNode(e))}}},959(e,r,n){var a=n(72),o=n.n(a),p=n(825),t=n.n(p),i=n(659),s=n.n(i),u=n(56),l=n.n(u),c=n(540),d=n.n(c),g=n(113),f=n.n(g),m=n(646),w={};w.styleTagTransform=f(),w.setAttributes=l(),w.insert=s().bind(null,"head"),w.domAPI=t(),w.insertStyleElement=d(),o()(m.A,w),m.A&&m.A.locals&&m.A.locals}}]);