"use strict";
// Writes a page's times in the browser's own zone, in the form that they have. Without scripts they
// are in the site's, which is shown when the pointer rests on one.
const localTimes = (() => {
  const SHORT = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
  const LONG = [
    ...["January", "February", "March", "April", "May", "June", "July", "August"],
    ...["September", "October", "November", "December"],
  ];
  const two = (number) => String(number).padStart(2, "0");
  const clock = (at, seconds) =>
    `${two(at.getHours())}:${two(at.getMinutes())}${seconds ? `:${two(at.getSeconds())}` : ""}`;
  const isToday = (at) => at.toDateString() === new Date().toDateString();

  // "3 Mar", "3 Mar 2024"
  const day = (at, text) => {
    const year = / \d{4}/.test(text) ? ` ${at.getFullYear()}` : "";
    return `${at.getDate()} ${SHORT[at.getMonth()]}${year}`;
  };

  // "10:42", "10:42:05", "10:42 on 3 March", "3 Mar 10:42", "3 Mar"
  const like = (text, at, alone) => {
    const time = clock(at, /\d\d:\d\d:\d\d/.test(text));
    if (!/\d\d:\d\d/.test(text)) return day(at, text);
    if (/^\d+ \w/.test(text)) return `${day(at, text)} ${time}`;
    return alone || isToday(at) ? time : `${time} on ${at.getDate()} ${LONG[at.getMonth()]}`;
  };

  const write = (root) => {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const at = new Date(element.dateTime);
      const zone = element.closest("[data-zone]")?.dataset.zone;
      element.title = `${element.textContent}${zone ? ` in ${zone}` : ""}`;
      const [first, second] = element.children;
      if (second) {
        first.textContent = day(at, first.textContent);
        second.textContent = clock(at, /:\d\d:/.test(second.textContent));
      } else {
        element.textContent = like(element.textContent, at, "alone" in element.dataset);
      }
    }
    for (const element of root.querySelectorAll("[data-own-zone]")) {
      element.textContent = `your time zone, ${Intl.DateTimeFormat().resolvedOptions().timeZone}`;
    }
  };
  return { clock, like, write };
})();
localTimes.write(document);
