document.querySelectorAll("svg.figure").forEach(report.prepare);
{
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const { csv, style } = read("figures");
  document.querySelectorAll("main figure").forEach((figure) => report.downloads(figure, csv, style));
  const all = document.getElementById("all-data");
  all.hidden = false;
  all.addEventListener("click", () => {
    const text = document.getElementById("results").textContent;
    report.save(new Blob([text], { type: "application/json" }), "results.json");
  });
}
