(() => {
  "use strict";
  // Searching as one types, where all cards are there anyway. Without this the form is sent.
  const cards = document.getElementById("gs-cards");
  const form = document.getElementById("gs-search");
  if (form && cards && cards.hasAttribute("data-whole")) {
    const all = [...cards.children];
    const texts = all.map((card) => card.textContent.toLowerCase());
    const found = document.getElementById("gs-found");
    const of = (name) => (form.elements[name] ? form.elements[name].value.toLowerCase() : "");
    const filter = () => {
      const words = of("q").split(/\s+/).filter(Boolean);
      const gpu = of("gpu");
      const framework = of("framework");
      const free = form.elements.now.checked;
      let shown = 0;
      all.forEach((card, at) => {
        const fits =
          words.every((word) => texts[at].includes(word)) &&
          (!gpu || card.dataset.gpu === gpu) &&
          (!framework || texts[at].includes(framework)) &&
          (!free || card.querySelector(".gs-free") !== null);
        card.hidden = !fits;
        shown += fits;
      });
      found.textContent = `${shown} of ${all.length} environments`;
    };
    form.addEventListener("input", filter);
  }
  // Without this the field can be selected and copied by hand.
  for (const button of document.querySelectorAll("[data-copy]")) {
    const field = document.getElementById(button.dataset.copy);
    button.hidden = false;
    button.addEventListener("click", async () => {
      field.select();
      try {
        await navigator.clipboard.writeText(field.value);
      } catch (error) {
        document.execCommand("copy"); // there is no clipboard without HTTPS
      }
      button.textContent = "Copied";
    });
  }
  // What is free now, while somebody looks.
  const places = new Map();
  for (const place of document.querySelectorAll("[data-now]")) {
    places.set(place.dataset.now, place);
  }
  const look = async () => {
    if (document.hidden || !places.size) {
      return;
    }
    const url = `${window.jhdata.base_url}environments/-/live?slugs=${[...places.keys()].join(",")}`;
    try {
      const answer = await fetch(url, { cache: "no-store" });
      if (!answer.ok) {
        return;
      }
      for (const [slug, state] of Object.entries(await answer.json())) {
        const place = places.get(slug);
        if (place && place.textContent !== state.now) {
          place.textContent = state.now;
          place.classList.toggle("gs-free", state.at_once);
          place.classList.toggle("gs-busy", !state.at_once);
        }
      }
    } catch (error) {
      // the hub is away for a moment: what was there stays
    }
  };
  window.setInterval(look, 15000);
})();
