// Writes beside the built files what they were built from, for a test to compare.
import { createHash } from 'node:crypto';
import { readFileSync, readdirSync, writeFileSync } from 'node:fs';

const { jupyterlab } = JSON.parse(readFileSync('package.json', 'utf8'));
const files = ['package-lock.json', 'package.json', 'seal.mjs', 'tsconfig.json'];
for (const folder of ['src', 'style']) {
  files.push(...readdirSync(folder).map(name => `${folder}/${name}`));
}
const lines = files.sort().map(name => {
  const hash = createHash('sha256').update(readFileSync(name)).digest('hex');
  return `${hash}  ${name}\n`;
});
writeFileSync(`${jupyterlab.outputDir}/source.sha256`, lines.join(''));
