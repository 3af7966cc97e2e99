'use strict';
// Markdown as elements: headings, lists, quotes, tables, rules, code, emphasis, links. Text of a model is never parsed as HTML.
const markdown = (() => {
  const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|__([^_]+)__|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
  const ITEM = /^(\s*)(?:[-*+]|(\d+)[.)])\s+(.*)$/;

  function inline(parent, text) {
    let end = 0;
    for (const found of text.matchAll(INLINE)) {
      parent.append(text.slice(end, found.index));
      end = found.index + found[0].length;
      const [, code, strong, other, emphasis, label, address] = found;
      if (code) page.add(parent, 'code', code);
      else if (label) Object.assign(page.add(parent, 'a', label), { href: address, rel: 'noreferrer noopener', target: '_blank' });
      else inline(page.add(parent, emphasis ? 'em' : 'strong'), strong || other || emphasis);
    }
    parent.append(text.slice(end));
  }

  function cells(line) {
    return line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());
  }

  function table(parent, head, rows) {
    const element = page.add(parent, 'table');
    for (const [row, line] of [head, ...rows].entries()) {
      const to = page.add(element, 'tr');
      for (const cell of cells(line)) inline(page.add(to, row ? 'td' : 'th'), cell);
    }
  }

  // Items of one list, those further to the right in lists inside them.
  function list(parent, lines) {
    const [, indent, number] = lines[0].match(ITEM), element = page.add(parent, number ? 'ol' : 'ul');
    if (number) element.start = Number(number);
    for (let i = 0; i < lines.length;) {
      const item = page.add(element, 'li');
      inline(item, lines[i].match(ITEM)?.[3] ?? lines[i].trim());
      const first = ++i;
      while (i < lines.length && !(lines[i].match(ITEM)?.[1].length <= indent.length)) ++i;
      const inner = lines.slice(first, i), nested = inner.findIndex((line) => ITEM.test(line));
      for (const line of nested < 0 ? inner : inner.slice(0, nested)) inline(item, ` ${line.trim()}`);
      if (nested >= 0) list(item, inner.slice(nested));
    }
  }

  function code(parent, lines) {
    const box = page.add(parent, 'div', null, 'code');
    const pre = page.add(box, 'pre');
    pre.tabIndex = 0;
    page.add(pre, 'code', lines.join('\n'));
    const button = page.add(box, 'button', 'Copy');
    button.type = 'button';
    button.dataset.copies = 'code';
  }

  // Number of lines of the block that begins at `lines[at]`, which is added to `parent`.
  function block(parent, lines, at) {
    const line = lines[at], extend = (test) => {
      let end = at + 1;
      while (end < lines.length && test(lines[end], end)) ++end;
      return end;
    };
    const fence = line.match(/^\s*(```+|~~~+)/);
    if (fence) {
      const end = extend((next) => !next.trim().startsWith(fence[1]));
      code(parent, lines.slice(at + 1, end));
      return end + 1 - at;
    }
    const heading = line.match(/^(#{1,6})\s+(.*)$/);
    if (heading) {
      inline(page.add(parent, `h${Math.min(5, heading[1].length + 2)}`), heading[2]);
      return 1;
    }
    if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      page.add(parent, 'hr');
      return 1;
    }
    if (/^\s*>/.test(line)) {
      const end = extend((next) => /^\s*>/.test(next));
      render(page.add(parent, 'blockquote'), lines.slice(at, end).map((quoted) => quoted.replace(/^\s*> ?/, '')));
      return end - at;
    }
    if (line.includes('|') && /^[\s|:-]*-[\s|:-]*$/.test(lines[at + 1] ?? '') && lines[at + 1].includes('|')) {
      const end = extend((next) => next.includes('|'));
      table(parent, line, lines.slice(at + 2, end));
      return end - at;
    }
    if (ITEM.test(line)) {
      const end = extend((next) => ITEM.test(next) || /^\s+\S/.test(next));
      list(parent, lines.slice(at, end));
      return end - at;
    }
    const end = extend((next) => next.trim() && !/^(\s*(```|~~~|>)|#{1,6}\s)/.test(next) && !ITEM.test(next));
    const paragraph = page.add(parent, 'p');
    lines.slice(at, end).forEach((text, i) => {
      if (i) page.add(paragraph, 'br');
      inline(paragraph, text);
    });
    return end - at;
  }

  function render(parent, lines) {
    for (let at = 0; at < lines.length;) at += lines[at].trim() ? block(parent, lines, at) : 1;
  }

  return (parent, text) => {
    parent.replaceChildren();
    render(parent, text.split('\n'));
  };
})();
