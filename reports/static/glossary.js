// Words of the glossary, explained where they stand: on hover, focus or tap. The explanations are the page's own list.
attnDiag.glossary = (() => {
  const { el } = attnDiag;
  const terms = new Map();
  const spelled = new Map();
  let pattern = null;
  let tip = null;
  let shown = null;
  let leaving = null;

  const SKIPPED = "script, style, svg, code, a, button, select, bdi, .bits, .digits, .spoken, #words";
  // A word is explained once in each of these.
  const SCOPE = "section, article, figure, header, ol, ul, table, p";

  const split = (text) => (text ? text.split("|") : []);
  // A capital at the start of a sentence; a symbol such as dQ keeps its small letter.
  const capital = (text) => (/^[a-z][a-z ]/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text);

  const read = () => {
    for (const name of document.querySelectorAll("#words dt")) {
      const term = { key: name.id, name: name.textContent, words: name.nextElementSibling.textContent };
      terms.set(term.key, term);
      for (const text of split(name.dataset.says)) spelled.set(text, term);
      for (const text of split(name.dataset.alone)) spelled.set(text, { ...term, alone: true });
    }
    const texts = [...spelled].filter(([, term]) => !term.alone).map(([text]) => text);
    const escaped = [...texts, ...texts.map(capital)].sort((a, b) => b.length - a.length).map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    pattern = new RegExp(`(?<![\\p{L}\\p{N}_/-])(?:${escaped.join("|")})(?![\\p{L}\\p{M}\\p{N}_(-])`, "gu");
  };

  const find = (text) => spelled.get(text) ?? spelled.get(text.charAt(0).toLowerCase() + text.slice(1));
  const link = (term, text) => el("a", { class: "term", href: `#${term.key}`, "data-term": term.key, "aria-describedby": `${term.key}-is` }, text);

  const pieces = (text, explained) => {
    const whole = find(text.trim());
    if (whole) {
      if (explained.has(whole.key)) return null;
      explained.add(whole.key);
      const [, before, inner, after] = text.match(/^(\s*)(.*?)(\s*)$/su);
      return [before, link(whole, inner), after];
    }
    const found = [];
    let last = 0;
    for (const match of text.matchAll(pattern)) {
      const term = find(match[0]);
      if (!term || explained.has(term.key)) continue;
      explained.add(term.key);
      found.push(text.slice(last, match.index), link(term, match[0]));
      last = match.index + match[0].length;
    }
    return found.length ? [...found, text.slice(last)] : null;
  };

  // Make the words in ``root`` explain themselves. A heading that is a button stays one.
  const mark = (root) => {
    if (!pattern) return;
    for (const button of root.querySelectorAll("thead button, .segments button")) {
      const term = find(button.textContent.trim());
      if (term) Object.assign(button.dataset, { term: term.key });
    }
    const scopes = new Map();
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const node of texts) {
      const { parentElement } = node;
      if (!node.data.trim() || parentElement.closest(SKIPPED)) continue;
      const scope = parentElement.closest(SCOPE) ?? root;
      if (!scopes.has(scope)) scopes.set(scope, new Set());
      const made = pieces(node.data, scopes.get(scope));
      if (made) node.replaceWith(...made);
    }
  };

  const hide = () => {
    clearTimeout(leaving);
    tip.hidden = true;
    shown = null;
  };
  const show = (from) => {
    clearTimeout(leaving);
    const { name, words } = terms.get(from.dataset.term);
    shown = from;
    tip.replaceChildren(el("b", {}, name), " ", words);
    tip.hidden = false;
    const box = from.getClientRects()[0];
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const below = box.bottom + 6 + tip.offsetHeight <= innerHeight;
    tip.style.left = `${Math.max(Math.min(box.left, room), 8) + scrollX}px`;
    tip.style.top = `${(below ? box.bottom + 6 : Math.max(box.top - 6 - tip.offsetHeight, 4)) + scrollY}px`;
  };

  const start = () => {
    if (!document.getElementById("words")) return;
    read();
    tip = el("div", { class: "word-tip", role: "tooltip", hidden: true });
    document.body.append(tip);
    const of = (event) => event.target.closest?.("[data-term]");
    document.addEventListener("mouseover", (event) => {
      if (of(event)) show(of(event));
      else if (tip.contains(event.target)) clearTimeout(leaving);
    });
    // The pointer may go into the explanation.
    document.addEventListener("mouseout", (event) => {
      if (shown && (of(event) || tip.contains(event.target)) && document.activeElement !== shown) leaving = setTimeout(hide, 200);
    });
    document.addEventListener("focusin", (event) => (of(event) ? show(of(event)) : shown && hide()));
    document.addEventListener("focusout", () => shown && hide());
    document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
    document.addEventListener("click", (event) => {
      const from = event.target.closest?.("a.term");
      if (!from) return;
      event.preventDefault();
      show(from);
    });
    for (const part of document.querySelectorAll("main > *, footer")) mark(part);
  };

  return { start, mark };
})();
