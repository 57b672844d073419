// The gallery's page: charts into their sections.
(async () => {
  attnDiag.theme.start();
  attnDiag.table.start();
  const sections = await attnDiag.data("attn-diag-gallery");
  document.querySelectorAll(".figures[data-section]").forEach((place) => {
    const charts = sections[Number(place.dataset.section)];
    place.append(...charts.map((chart) => attnDiag.charts.figure(chart, { wide: charts.length === 1 || chart.map?.names.length > 0, height: chart.map ? 340 : 280 })));
  });
  // Of pages that explain their words.
  attnDiag.glossary?.start();
  attnDiag.when?.start();
  document.documentElement.dataset.ready = "yes";
})();
