// What a search is made of, as the address has it and as the server takes it.

export const FILTERS = [
  { name: "step", label: "Step", hint: "3, 3..7" },
  { name: "task", label: "Task", kind: "task" },
  { name: "reward", label: "Reward", hint: "0..0.5" },
  { name: "length", label: "Tokens", hint: "100.." },
  { name: "text", label: "Text", hint: "letter for letter" },
  { name: "group", label: "Group", hint: "its id" },
  { name: "server", label: "Server", hint: "its id" },
];

export const ORDERS = [
  ["step-down", "newest first"],
  ["step-up", "oldest first"],
  ["reward-down", "highest reward"],
  ["reward-up", "lowest reward"],
  ["length-down", "longest"],
  ["length-up", "shortest"],
];

/** Those that are set, of an address; others in it are left alone. */
export function filtersOf(parameters) {
  const found = {};
  for (const { name } of FILTERS) {
    const value = (parameters.get(name) ?? "").slice(0, 1000);
    if (value.trim() !== "") found[name] = name === "text" ? value : value.trim();
  }
  const sort = parameters.get("sort");
  if (ORDERS.some(([each]) => each === sort) && sort !== ORDERS[0][0]) found.sort = sort;
  return found;
}

/** The query of a page. */
export function searchOf(filters, page) {
  const { sort = ORDERS[0][0], ...wanted } = filters;
  const [order, way] = sort.split("-");
  const given = Object.entries(page).filter(([, value]) => value !== null);
  return new URLSearchParams({ ...wanted, order, descending: way === "down", ...Object.fromEntries(given) });
}
