"use strict";

// Our only global. Each file adds one thing to it; files are joined in the order that reports/html.py names; that also
// adds "vocabulary", the names of quantities, tests and parts, from reports/quantities.py.
const attnDiag = {};

// An element with attributes and children. Text goes in as text nodes only, so no name or note can become markup.
attnDiag.el = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null));
  return element;
};

// The data of a JSON script element; large ones are {"gzip": base64}.
attnDiag.data = async (id) => {
  const data = JSON.parse(document.getElementById(id).textContent);
  if (typeof data.gzip !== "string") return data;
  const bytes = Uint8Array.from(atob(data.gzip), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
};
