// Light and dark: the system's choice until the switch says else. Charts take their colours from the style sheet.
attnDiag.theme = (() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const printed = matchMedia("print");
  const KEY = "attn-diag-theme";
  const listeners = [];
  const changed = () => listeners.forEach((listener) => listener());

  // Storage may be refused on file://; the switch then lasts as long as the page.
  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  };
  const store = (value) => {
    try {
      localStorage.setItem(KEY, value);
    } catch {
      // Nothing is lost but the memory of it.
    }
  };

  const dark = () => !printed.matches && (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  const start = () => {
    const before = stored();
    if (before === "light" || before === "dark") root.dataset.theme = before;
    const button = document.getElementById("theme");
    const label = () => {
      button.textContent = dark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      store(root.dataset.theme);
      label();
      changed();
    });
    system.addEventListener("change", () => (label(), changed()));
    // On paper charts must be dark on white, and as wide as the paper.
    printed.addEventListener("change", changed);
    label();
  };

  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  // Double quotes would end the attribute in a saved SVG.
  const font = () => getComputedStyle(document.body).fontFamily.replaceAll('"', "'");

  // Cividis (Nunez, Anderton & Renslow, PLOS ONE 2018): even in lightness for every kind of colour vision.
  const magnitude = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
  // Blue for negative, orange for positive, told apart by everybody; the middle is the page's own ground.
  const signs = () => ["#2b6cb0", "#7fa8d4", dark() ? "#3a414a" : "#f1f1ee", "#e9a262", "#c65f0a"];

  // Black or white, whichever is easier to read on a colour (WCAG 2 relative luminance).
  const readable = (background) => {
    const parts = background.match(/\d+(\.\d+)?/g).slice(0, 3).map((part) => Number(part) / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
  };

  // The colour at 0..1 along a palette of hexadecimal colours.
  const along = (palette, at) => {
    const place = Math.min(Math.max(at, 0), 1) * (palette.length - 1);
    const i = Math.min(Math.floor(place), palette.length - 2);
    const [from, to] = [palette[i], palette[i + 1]].map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)));
    return `rgb(${from.map((part, k) => Math.round(part + (place - i) * (to[k] - part))).join(", ")})`;
  };

  return { start, color, font, magnitude, signs, readable, along, onChange: (listener) => listeners.push(listener) };
})();
