// The report's page: the map, the chosen head, and the address that keeps it.
(async () => {
  attnDiag.theme.start();
  attnDiag.table.start();
  const entries = attnDiag.entries.list(await attnDiag.data("attn-diag-diagnosis"));
  if (!entries.length) return;
  const byPlace = new Map(entries.map((entry) => [entry.place, entry]));
  const head = document.getElementById("head");
  const links = new Map([...document.querySelectorAll("#heads a")].map((link) => [link.getAttribute("href").slice(1), link]));

  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const show = (entry) => {
    attnDiag.head.show(entry);
    map.show(entry);
    document.querySelectorAll("#heads tr.chosen").forEach((row) => row.classList.remove("chosen"));
    links.get(entry.place)?.closest("tr").classList.add("chosen");
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
  const map = attnDiag.map.start(entries, choose);

  addEventListener("hashchange", () => {
    const entry = byPlace.get(location.hash.slice(1));
    show(entry ?? worst());
    if (entry) reveal();
  });
  // A link to the head that is already shown is no change of the address.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (link && link.getAttribute("href") === location.hash) reveal();
  });

  const asked = byPlace.get(location.hash.slice(1));
  performance.mark("attn-diag-first-chart");
  document.documentElement.dataset.ready = "map";
  // The map first; the details in the next frame.
  requestAnimationFrame(() => {
    show(asked ?? worst());
    if (asked) head.scrollIntoView({ block: "start" });
    document.documentElement.dataset.ready = "yes";
  });
})();
