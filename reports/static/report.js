// The report's page: the map, the chosen head, and the address that keeps it.
(async () => {
  attnDiag.theme.start();
  attnDiag.table.start();
  attnDiag.when.start();
  attnDiag.glossary.start();
  const { diagnosis, complete, rank } = await attnDiag.entries.read("attn-diag-diagnosis");
  const entries = attnDiag.entries.list(diagnosis);
  if (!entries.length) return;
  const byPlace = new Map(entries.map((entry) => [entry.place, entry]));
  const head = document.getElementById("head");
  const apart = document.getElementById("attn-diag-apart") ? attnDiag.data("attn-diag-apart") : { charts: [], sites: null };
  attnDiag.rows.start(entries, rank, apart.sites);

  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let wanted = null;
  const show = async (entry) => {
    wanted = entry;
    await complete(entry.head);
    if (wanted !== entry) return;
    attnDiag.head.show(entry);
    attnDiag.glossary.mark(head);
    map.show(entry);
    document.querySelectorAll("#heads tr.chosen").forEach((row) => row.classList.remove("chosen"));
    document.querySelector(`#heads a[href="#${entry.place}"]`)?.closest("tr").classList.add("chosen");
  };
  const reveal = () => {
    head.scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
    head.focus({ preventScroll: true });
  };
  // Our places are names of no element: the browser itself never scrolls to them.
  const choose = (entry) => {
    if (location.hash === `#${entry.place}`) reveal();
    else location.hash = entry.place;
  };
  const worst = () => byPlace.get(document.querySelector(".which a")?.getAttribute("href").slice(1)) ?? entries[0];
  const asked = byPlace.get(location.hash.slice(1));
  const map = attnDiag.map.start(entries, choose, asked ?? worst());
  attnDiag.glossary.mark(document.getElementById("overview"));

  addEventListener("hashchange", async () => {
    // The address of a word of the glossary.
    if (document.getElementById(location.hash.slice(1))) return;
    const entry = byPlace.get(location.hash.slice(1));
    await show(entry ?? worst());
    if (entry) reveal();
  });
  // A link to the head that is already shown is no change of the address.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (link && link.getAttribute("href") === location.hash) reveal();
  });

  document.querySelectorAll(".figures[data-apart]").forEach((place) => {
    place.append(...apart.charts[Number(place.dataset.apart)].map((chart) => attnDiag.charts.figure(chart, { wide: true, height: 340 })));
    attnDiag.glossary.mark(place.parentElement);
  });

  performance.mark("attn-diag-first-chart");
  document.documentElement.dataset.ready = "map";
  // The map first; the details in the next frame.
  requestAnimationFrame(async () => {
    await show(asked ?? worst());
    if (asked) head.scrollIntoView({ block: "start" });
    document.documentElement.dataset.ready = "yes";
  });
})();
