// Asks for what there is to see every two seconds, and puts in place what has changed.
{
  const at = (id) => document.getElementById(id);
  const seen = {};
  const ask = async () => {
    try {
      const answer = await fetch("live.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(`answer ${answer.status}`);
      const live = await answer.json();
      document.title = `${live.title} · vitesse`;
      at("title").textContent = live.title;
      at("about").textContent = live.about;
      at("state").textContent = live.state;
      at("share").value = live.share;
      at("share").hidden = !(live.share > 0);
      for (const [id, html] of Object.entries(live.sections)) {
        // Whoever reads a tip goes on reading.
        if (seen[id] === html || at(id).querySelector(".mark.shown")) continue;
        seen[id] = html;
        at(id).innerHTML = html;
        at(id).querySelectorAll("svg.figure").forEach(report.prepare);
      }
    } catch (error) {
      at("state").textContent = "No answer: the run has ended, or its page was stopped. What was last seen stays here.";
    }
    setTimeout(ask, 2000);
  };
  ask();
}
