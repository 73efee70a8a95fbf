// What makes the pages live: numbers change in their places, rows stay selected, and dates are in local time.

// -- changes in place: the new content is compared with the old one, element by element

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id : '';
}

function isSame(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && keyOf(old) === keyOf(fresh);
}

function updateAttributes(old, fresh) {
  for (const {name} of Array.from(old.attributes)) {
    if (!fresh.hasAttribute(name) && !['hidden', 'disabled', 'class', 'open'].includes(name)) old.removeAttribute(name);
  }
  for (const {name, value} of Array.from(fresh.attributes)) {
    // What the script has shown or hidden stays so; what the user has checked or typed is a property.
    if (name !== 'hidden' && !(name === 'class' && old.matches('form, .changed')) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

function mark(node) {
  if (/\d [smhd]( ago)?$/.test(node.nodeValue)) return; // ages change all the time
  const cell = node.parentElement && node.parentElement.closest('td, dd');
  if (!cell) return;
  cell.classList.remove('changed');
  void cell.offsetWidth; // begin the animation again
  cell.classList.add('changed');
}

function update(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) {
      old.nodeValue = fresh.nodeValue;
      mark(old);
    }
    return;
  }
  if (old.matches('time.exact') && old.dateTime === fresh.dateTime) return;
  updateAttributes(old, fresh);
  if ('selected' in old.dataset) return; // the number of selected rows
  updateChildren(old, fresh);
}

function isBlank(node) {
  return node.nodeType === Node.TEXT_NODE && !node.nodeValue.trim();
}

function updateChildren(old, fresh) {
  const keeps = 'keep' in old.dataset; // rows that are not there any more stay in their places, marked
  const byId = new Map(Array.from(old.children).filter(keyOf).map(node => [node.id, node]));
  const rest = Array.from(old.childNodes).filter(node => !isBlank(node) && !byId.has(keyOf(node)));
  let last = null; // the last node that is in its place
  for (const wanted of Array.from(fresh.childNodes).filter(node => !isBlank(node))) {
    const at = rest.findIndex(node => isSame(node, wanted));
    // Without an id, the next node of this kind is the same one; those before it are gone.
    const known = byId.get(keyOf(wanted)) || (at >= 0 ? rest.splice(0, at + 1)[at] : null);
    const place = last ? last.nextSibling : old.firstChild;
    if (known) update(known, wanted);
    if (!known || (!keeps && known !== nextSolid(place))) old.insertBefore(known || wanted, place);
    last = known || wanted;
    last.isKept = true;
  }
  for (const node of Array.from(old.childNodes)) {
    if (!node.isKept && !isBlank(node)) {
      if (keeps) node.classList.add('gone');
      else node.remove();
    }
    delete node.isKept;
  }
}

function nextSolid(node) {
  while (node && isBlank(node)) node = node.nextSibling;
  return node;
}

htmx.defineExtension('in-place', {
  isInlineSwap: style => style === 'in-place',
  handleSwap: (style, target, fragment) => {
    if (style !== 'in-place') return false;
    updateChildren(target, fragment);
    localize(target);
    select();
    offerCopies();
    return [];
  },
});

document.addEventListener('animationend', event => event.target.classList.remove('changed'));

// -- dates in the time zone of the browser

function localize(part) {
  for (const time of part.querySelectorAll('time[datetime]')) {
    const date = new Date(time.dateTime);
    const isToday = date.toDateString() === new Date().toDateString();
    time.title = date.toLocaleString();
    if (time.matches('.exact')) time.textContent = isToday ? date.toLocaleTimeString() : time.title;
  }
}

// -- selected rows

function select() {
  for (const form of document.querySelectorAll('form.selection')) {
    const boxes = Array.from(form.querySelectorAll('input[name=select]'));
    const count = boxes.filter(box => box.checked).length;
    const all = form.querySelector('[data-all]');
    all.hidden = false;
    all.checked = count > 0 && count === boxes.length;
    all.indeterminate = count > 0 && count < boxes.length;
    form.querySelector('[data-selected]').textContent = count ? `${count} selected` : 'Select rows to change them';
    form.querySelectorAll('.bar button').forEach(button => { button.disabled = !count; });
    form.classList.add('js');
    form.classList.toggle('any', count > 0);
  }
}

document.addEventListener('change', event => {
  if ('all' in event.target.dataset) {
    for (const box of event.target.form.querySelectorAll('input[name=select]')) box.checked = event.target.checked;
  }
  select();
});

// -- the stream of events

document.addEventListener('htmx:sseOpen', () => { show('lost', false); dot(true); });
document.addEventListener('htmx:sseError', () => { show('lost', true); dot(false); });
document.addEventListener('htmx:sseClose', event => { if (event.detail.type === 'message') location.reload(); });
document.addEventListener('htmx:sseMessage', event => {
  const banner = document.getElementById('banner');
  localize(banner);
  dot(!banner.firstElementChild);
});

function show(id, isShown) {
  const found = document.getElementById(id);
  if (found) found.hidden = !isShown;
}

function dot(isLive) {
  const found = document.getElementById('dot');
  if (found) found.classList.toggle('live', isLive);
}

// The page of an error is loaded again when CouchDB responds.
document.addEventListener('htmx:sseOpen', event => {
  if (document.querySelector('[data-reload]')) event.detail.source.addEventListener('change', () => location.reload());
});

// -- what people copy has a button for it

function offerCopies() {
  if (!navigator.clipboard) return; // it is there on localhost and with TLS only
  for (const shown of document.querySelectorAll('[data-copy]')) {
    if (shown.nextElementSibling && shown.nextElementSibling.classList.contains('copy')) continue;
    const button = document.createElement('button');
    button.type = 'button';
    button.className = 'quiet copy';
    button.textContent = `Copy ${shown.dataset.copy}`;
    button.addEventListener('click', () => navigator.clipboard.writeText(shown.textContent).then(() => { button.textContent = 'Copied'; }));
    shown.after(button);
  }
}

// On a phone, the tab of this page is in sight.
const tab = document.querySelector('nav [aria-current]');
if (tab) tab.parentElement.parentElement.parentElement.scrollLeft = tab.offsetLeft - 40;

localize(document);
select();
offerCopies();
