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

// The data of a JSON script element.
attnDiag.data = (id) => JSON.parse(document.getElementById(id).textContent);

// What was gzipped and written in base64.
attnDiag.unzipped = (text) => {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
};

// Records from the columns that results/packing.py writes.
attnDiag.unpacked = (columns) => {
  if (Array.isArray(columns)) return columns;
  const keys = Object.keys(columns.each ?? columns.items);
  const parts = Object.values(columns.each ?? columns.items).map(attnDiag.unpacked);
  return parts[0].map((_, i) => (columns.each ? Object.fromEntries(keys.map((key, k) => [key, parts[k][i]])) : parts.map((part) => part[i])));
};
