// The curve of the last hour, drawn here.

import type { IDevice, IMinute } from './answer';

const NAMESPACE = 'http://www.w3.org/2000/svg';
const HOUR = 3600000;
const MINUTE = 60000;
const [WIDTH, HEIGHT] = [240, 84];
const [LEFT, TOP, BOTTOM] = [26, 4, 14];

/** Use and memory of a device in the last hour, both in percent; null when nothing is known. */
export function curve(device: IDevice, now: number): SVGSVGElement | null {
  const uses = lines(device.minutes, now, minute => minute.use_percent);
  const memory = lines(device.minutes, now, minute =>
    minute.used_bytes === null ? null : (100 * minute.used_bytes) / device.memory_bytes
  );
  if (!uses.length && !memory.length) {
    return null;
  }
  const drawing = element('svg', {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    class: 'gpuspawner-curve',
    role: 'img',
    'aria-label': 'Utilization and memory in the last hour'
  });
  for (const [value, word] of [
    [0, '0 %'],
    [50, ''],
    [100, '100']
  ] as const) {
    const y = height(value);
    drawing.append(
      element('line', { class: 'gpuspawner-grid', x1: LEFT, x2: WIDTH, y1: y, y2: y }),
      label(word, LEFT - 3, y + 3, 'end')
    );
  }
  drawing.append(
    label('1 h ago', LEFT, HEIGHT - 2, 'start'),
    label('now', WIDTH, HEIGHT - 2, 'end')
  );
  for (const [name, found] of [
    ['memory', memory],
    ['use', uses]
  ] as const) {
    for (const points of found) {
      drawing.append(element('polyline', { class: `gpuspawner-line gpuspawner-${name}`, points }));
    }
  }
  return drawing as SVGSVGElement;
}

/** Points of each stretch of minutes without a gap. */
function lines(
  minutes: IMinute[],
  now: number,
  read: (minute: IMinute) => number | null
): string[] {
  const stretches: string[][] = [];
  let last = -Infinity;
  for (const minute of minutes) {
    const at = Date.parse(minute.at);
    const value = read(minute);
    if (value === null) {
      continue;
    }
    if (at - last > 1.5 * MINUTE) {
      stretches.push([]);
    }
    last = at;
    const right = LEFT + (WIDTH - LEFT) * (1 - (now - at - MINUTE) / HOUR);
    const left = right - ((WIDTH - LEFT) * MINUTE) / HOUR;
    const y = height(Math.min(100, Math.max(0, value))).toFixed(1);
    const stretch = stretches[stretches.length - 1];
    // A minute is as wide as it was long, so that a single one can be seen.
    stretch.push(`${Math.max(LEFT, left).toFixed(1)},${y}`);
    stretch.push(`${Math.min(WIDTH, Math.max(LEFT, right)).toFixed(1)},${y}`);
  }
  return stretches.map(points => points.join(' '));
}

function height(value: number): number {
  return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / 100);
}

function label(word: string, x: number, y: number, anchor: string): SVGElement {
  const found = element('text', { x, y, 'text-anchor': anchor });
  found.textContent = word;
  return found;
}

function element(name: string, attributes: Record<string, string | number>): SVGElement {
  const found = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) {
    found.setAttribute(key, String(value));
  }
  return found;
}
