// The collector's JSON. A failed request throws an Error whose message is a sentence for people.

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
  get passes() { return this.status === 0 || this.status >= 500; } // trying again may help
}

export async function ask(name, parameters, signal) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters || {})) {
    if (value !== "" && value !== null && value !== undefined) query.set(key, value);
  }
  let answer;
  try {
    answer = await fetch(`api/${name}?${query}`, { signal, headers: { Accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The collector does not answer: it may be restarting. Trying again.", 0);
  }
  let body;
  try {
    body = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(answer.status === 401 || answer.status === 403
      ? "The collector asks for a token that may read."
      : `The collector answered ${answer.status} and no JSON. Trying again.`, answer.status);
  }
  if (!answer.ok) throw new Refused(body.error || `The collector answered ${answer.status}.`, answer.status);
  return body;
}
