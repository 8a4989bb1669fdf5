"use strict";
// Goes on by itself: asks for pictures while the page is looked at, and writes them into the tiles.
// All of it is text; nothing that comes is ever taken for HTML.
(() => {
  const list = document.getElementById("tiles");
  if (!list || !window.EventSource) return;
  const loaded = Date.now();
  const words = JSON.parse(list.dataset.words);
  const tiles = new Map([...list.children].map((tile) => [tile.dataset.uuid, tile]));
  let mine = null;
  let last = null;
  let source = null;
  let leaving = false;

  const put = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  const since = (place, text, at) => {
    const local = (shown) => localTimes.like(shown, new Date(at), true);
    put(place, at ? text.replace(/(\d+ \w+ )?\d\d:\d\d$/, local) : text);
  };
  for (const tile of tiles.values()) {
    const place = tile.querySelector("[data-at]");
    since(place, place.textContent, place.dataset.at);
  }
  const say = (id, text) => put(document.getElementById(id), text);

  const leave = () => {
    close();
    say("live", "Not live just now.");
    if (!leaving) again();
    leaving = true;
  };

  // Loads the page again when the service answers, whatever it says: the sign-in leads back here.
  // A page that has to do so time and again does it seldom, and one that nobody sees not at all.
  const again = () => {
    const wait = (Date.now() - loaded > 60000 ? 3000 : 20000) + 5000 * Math.random();
    setTimeout(async () => {
      let there = false;
      try {
        const answer = document.hidden
          ? null
          : await fetch(location.href, { redirect: "manual", cache: "no-store" });
        there = answer && (answer.type === "opaqueredirect" || answer.status < 500);
      } catch {
        // Nobody answers yet.
      }
      if (there) location.reload();
      else again();
    }, wait);
  };

  const write = (tile, told, own) => {
    const texts = { ...told, ...own };
    for (const place of tile.querySelectorAll("[data-text]")) {
      const name = place.dataset.text;
      if (name === "state") {
        place.className = `state ${told.state}`;
        put(place, words[told.state] || told.state);
      } else if (name === "since") {
        since(place, texts.since, texts.since_at);
      } else {
        put(place, texts[name] || "");
      }
    }
    for (const bar of tile.querySelectorAll("[data-width]")) {
      bar.setAttribute("width", told[bar.dataset.width]);
    }
    tile.querySelectorAll(".slot").forEach((slot, number) => {
      slot.classList.toggle("taken", Boolean(told.slots && told.slots[number]));
      slot.classList.toggle("own", Boolean(own && own.slots.includes(number)));
    });
    tile.classList.toggle("own", own !== undefined);
  };

  const draw = () => {
    if (!last || !mine) return;
    const uuids = Object.keys(last.tiles);
    if (uuids.length !== tiles.size || uuids.some((uuid) => !tiles.has(uuid))) {
      leave();  // there are other devices than before
      return;
    }
    say("summary", last.summary);
    for (const uuid of uuids) write(tiles.get(uuid), last.tiles[uuid], mine[uuid]);
    trouble(last.seen ? "" : words.unseen);
  };

  const trouble = (text) => {
    const place = document.getElementById("trouble");
    place.hidden = !text;
    put(place, text);
  };

  const open = () => {
    if (source || leaving || document.hidden) return;
    source = new EventSource(list.dataset.live);
    const hear = (name, work) =>
      source.addEventListener(name, (event) => work(JSON.parse(event.data)));
    hear("picture", (picture) => { last = picture; if (mine) draw(); });
    hear("mine", (own) => { mine = own; draw(); });
    hear("trouble", (text) => { if (text) trouble(text); else draw(); });
    hear("time", (at) => {
      say("as-of", `As of ${localTimes.clock(new Date(at), true)}.`);
      say("live", "Live.");
    });
    source.onerror = () => {
      // A stream ends now and then, and the browser asks anew by itself. When it may not, the
      // session is over or the service has begun anew: the page signs in again.
      if (source && source.readyState === EventSource.CLOSED) {
        leave();
      }
    };
  };
  const close = () => {
    if (source) source.close();
    source = null;
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      close();
      say("live", "");
    } else {
      open();
    }
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  open();
})();
