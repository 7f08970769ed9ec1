// The address holds the state: a link to it shows the same picture, and Back goes back.

const listeners = new Set();

export function state() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

// Changes that are empty leave the address.
export function address(changes, { keep = true } = {}) {
  const parameters = new URLSearchParams(keep ? location.search : "");
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) parameters.delete(name);
    else parameters.set(name, value);
  }
  return `?${parameters}`;
}

// A new place in the history.
export function go(changes, options) {
  history.pushState(null, "", address(changes, options));
  for (const listener of listeners) listener();
}

// The same place, remembered better: no new history entry, nothing shown anew.
export function remember(changes) {
  history.replaceState(null, "", address(changes));
}

export function onMove(listener) {
  listeners.add(listener);
  addEventListener("popstate", listener);
}

export const runPlace = (run, changes = {}) => address({ run, ...changes }, { keep: false });
