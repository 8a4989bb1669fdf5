// Writes the times of a page in the browser's own zone; without scripts they name the hub's.
function showLocalTimes(root) {
  const today = new Date().toDateString();
  for (const element of root.querySelectorAll("time[datetime]")) {
    const at = new Date(element.dateTime);
    const day = { day: "numeric", month: "short" };
    element.title = at.toLocaleString([], { dateStyle: "full", timeStyle: "long" });
    element.textContent = at.toLocaleString([], {
      hour: "2-digit",
      minute: "2-digit",
      ...(at.toDateString() === today ? {} : day),
    });
  }
}
