import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { UUID } from '@lumino/coreutils';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import type { IQuote, ISubmitted, Options } from './answer';
import type { Session } from './session';
import { NOT_RESPONDING, accountLabel, make, preemptibleLabel, price, start } from './words';

const EXPLAINED =
  'A copy of the saved notebook runs from the top in a fresh kernel, with GPUs of its own. ' +
  'What is in the memory of this kernel is not carried over.';

const READ_ONLY =
  'This notebook is read-only, so your changes cannot be saved. Save a copy, and finish that.';

const PREEMPTIBLE =
  'It only gets GPUs that nobody else can use. When somebody needs them, it is stopped, and begins ' +
  'again from the top when GPUs are idle.';

const REQUEUE = 'begin again from the top if the hub interrupts it, at most three times';

/** What asks for a share of a GPU in place of a number. */
const SHARE = 'share';

const ASKING = 'Asking for price and start…';

// Milliseconds after the last change until the price is asked again.
const TYPING = 400;

/** A sentence for the member. */
class Refusal extends Error {}

/**
 * What a run needs: its fields, what they cost, and when it would start.
 */
export class Form extends Widget {
  /** Set when the run is accepted. */
  submitted: ISubmitted | null = null;

  readonly changed = new Signal<this, void>(this);

  constructor(
    private settings: ServerConnection.ISettings,
    private path: string,
    private session: Session
  ) {
    super();
    this.addClass('gpuspawner-form');
    this.hours.type = 'number';
    this.hours.step = 'any';
    this.hours.min = '0.25';
    for (const box of [this.stop, this.preemptible, this.requeue]) {
      box.type = 'checkbox';
    }
    this.facts.setAttribute('aria-live', 'polite');
    this.problem.setAttribute('role', 'alert');
    const meaning = make('p', 'gpuspawner-meaning', PREEMPTIBLE);
    meaning.id = `gpuspawner-${this.key}`;
    this.preemptible.setAttribute('aria-describedby', meaning.id);
    this.cheaper.append(check(this.preemptible, this.share), meaning);
    this.rest.append(this.fields, this.parameters, this.cheaper, check(this.requeue, REQUEUE));
    this.rest.append(this.facts, check(this.stop, 'and stop this server'));
    this.rest.hidden = true;
    this.node.append(make('p', '', EXPLAINED), this.rest, this.problem);
    for (const priced of [this.fields, this.cheaper]) {
      priced.addEventListener('input', () => this.askSoon());
    }
    this.tell();
  }

  /** True if the run can be submitted as it is shown. */
  get isReady(): boolean {
    return this.quote !== null && !this.busy && !this.refusal && !this.quote.refusal;
  }

  get stops(): boolean {
    return this.stop.checked;
  }

  /** Show the fields, unless the notebook has changes that cannot be saved. */
  async begin(changed: Promise<boolean>): Promise<void> {
    this.busy = ASKING;
    this.tell();
    try {
      if (await changed) {
        throw new Refusal(READ_ONLY);
      }
      const { quote, parameters } = await this.post<IBegin>('quote', { path: this.path });
      this.quote = quote;
      this.fill(quote, parameters);
    } catch (error) {
      this.refusal = sentence(error);
    }
    this.busy = '';
    this.tell();
  }

  /** Submit the run. Return true if it was accepted. */
  async submit(): Promise<boolean> {
    const inputs = Array.from(this.parameters.querySelectorAll('input'));
    const body = {
      path: this.path,
      key: this.key,
      options: this.options,
      preemptible: this.isPreemptible,
      requeue: this.requeue.checked,
      parameters: Object.fromEntries(inputs.map(input => [input.name, input.value]))
    };
    this.busy = 'Submitting…';
    this.said = '';
    this.tell();
    try {
      this.submitted = await this.post<ISubmitted>('submit', body);
    } catch (error) {
      this.said = sentence(error);
    }
    this.busy = '';
    this.tell();
    return this.submitted !== null;
  }

  private askSoon(): void {
    window.clearTimeout(this.timer);
    this.asked += 1;
    this.busy = ASKING;
    this.said = '';
    this.tell();
    this.timer = window.setTimeout(() => void this.ask(), TYPING);
  }

  private async ask(): Promise<void> {
    const { asked } = this;
    let [quote, refusal]: [IQuote | null, string] = [null, ''];
    try {
      const { path, options, isPreemptible: preemptible } = this;
      const body = { path, options, preemptible };
      quote = (await this.post<IBegin>('quote', body)).quote;
    } catch (error) {
      refusal = sentence(error);
    }
    if (asked !== this.asked) {
      return; // something else was chosen meanwhile
    }
    this.quote = quote ?? this.quote;
    this.refusal = refusal;
    this.busy = '';
    this.tell();
  }

  private get isPreemptible(): boolean {
    return this.canBePreemptible && this.preemptible.checked;
  }

  private get canBePreemptible(): boolean {
    return this.quote !== null && this.quote.preemptible_share !== null && this.gpus.value !== '0';
  }

  private get options(): Options {
    const count = this.gpus.value;
    const gpus = count === SHARE ? SHARE : Number(count);
    const chosen: Options = { gpus, gpu_model: this.model.value };
    if (this.account.options.length > 1) {
      chosen.account = this.account.value;
    }
    return { ...this.quote?.options, ...chosen, hours: this.hours.value };
  }

  private fill(quote: IQuote, parameters: Record<string, string>): void {
    const least = quote.cpu_variant ? 0 : 1;
    const isShare = quote.gpus > 0 && quote.options.gpus === SHARE;
    const onlyShare = Boolean(quote.share) && !quote.most_gpus;
    const most = isShare || onlyShare ? quote.most_gpus : Math.max(quote.most_gpus, quote.gpus);
    for (let count = least; count <= most; count++) {
      this.gpus.add(new Option(count ? String(count) : 'none', String(count)));
    }
    if (quote.share) {
      this.gpus.add(new Option(quote.share, SHARE));
    }
    this.gpus.value = isShare || (onlyShare && quote.gpus) ? SHARE : String(quote.gpus);
    const wanted = String(quote.options.gpu_model ?? '');
    for (const model of new Set(['', ...quote.models, wanted])) {
      this.model.add(new Option(model || 'any', model));
    }
    this.model.value = wanted;
    this.hours.value = String(quote.options.hours ?? '');
    this.hours.max = quote.most_hours === null ? '' : String(quote.most_hours);
    for (const each of quote.accounts) {
      this.account.add(new Option(accountLabel(each), each.account));
    }
    this.account.value = quote.account;
    this.fields.append(
      row('Environment', make('span', '', quote.environment_name)),
      row('GPUs', this.gpus),
      row('GPU model', this.model),
      row('Time limit in hours', this.hours),
      row('Paid by', this.account)
    );
    for (const [name, value] of Object.entries(parameters)) {
      const input = document.createElement('input');
      Object.assign(input, { name, value });
      this.parameters.append(row(name, input));
    }
    if (this.parameters.childElementCount) {
      this.parameters.prepend(make('legend', '', 'Parameters'));
    }
    this.rest.hidden = false;
  }

  private tell(): void {
    const { quote } = this;
    this.cheaper.hidden = !this.canBePreemptible;
    if (quote) {
      this.share.textContent = preemptibleLabel(quote.preemptible_share ?? 1);
      show(this.model, quote.models.length > 1 && this.gpus.value !== '0');
      show(this.hours, this.gpus.value !== '0');
      show(this.account, quote.accounts.length > 1);
      this.hours.placeholder = quote.hours === null ? 'no limit' : String(quote.hours);
    }
    this.parameters.hidden = !this.parameters.childElementCount;
    const lines = quote && !this.refusal ? [price(quote), start(quote, this.session.clock())] : [];
    const shown = this.busy ? [this.busy] : lines;
    this.facts.replaceChildren(...shown.map(line => make('p', '', line)));
    const problem = this.busy ? '' : this.refusal || quote?.refusal || this.said;
    this.problem.textContent = problem;
    this.problem.hidden = !problem;
    if (problem) {
      this.problem.scrollIntoView({ block: 'nearest' });
    }
    this.changed.emit();
  }

  private async post<T>(what: 'quote' | 'submit', body: object): Promise<T> {
    const url = URLExt.join(this.settings.baseUrl, 'gpuspawner', 'runs', what);
    const init = { method: 'POST', body: JSON.stringify(body) };
    let told: T & { message?: string };
    try {
      const response = await ServerConnection.makeRequest(url, init, this.settings);
      if (!response.ok) {
        throw new ServerConnection.ResponseError(response);
      }
      told = await response.json();
    } catch {
      throw new Refusal(NOT_RESPONDING);
    }
    if (told.message) {
      throw new Refusal(told.message);
    }
    return told;
  }

  private gpus = document.createElement('select');
  private model = document.createElement('select');
  private hours = document.createElement('input');
  private account = document.createElement('select');
  private stop = document.createElement('input');
  private preemptible = document.createElement('input');
  private requeue = document.createElement('input');
  private share = make('span', '');
  private cheaper = make('div', '');
  private fields = make('div', 'gpuspawner-fields');
  private parameters = make('fieldset', 'gpuspawner-fields');
  private facts = make('div', 'gpuspawner-facts');
  private problem = make('p', 'gpuspawner-warning');
  private rest = make('div', '');
  private key = UUID.uuid4();
  private quote: IQuote | null = null;
  private busy = '';
  // Why it cannot be submitted as it is, and why the last attempt failed.
  private refusal = '';
  private said = '';
  private asked = 0;
  private timer = 0;
}

interface IBegin {
  quote: IQuote;
  parameters: Record<string, string>;
}

function sentence(error: unknown): string {
  if (error instanceof Refusal) {
    return error.message;
  }
  console.error(error);
  return NOT_RESPONDING;
}

function check(box: HTMLInputElement, text: string | HTMLElement): HTMLElement {
  const label = make('label', 'gpuspawner-check');
  label.append(box, text);
  return label;
}

function row(name: string, field: HTMLElement): HTMLElement {
  const label = make('label', '');
  label.append(make('span', '', name), field);
  return label;
}

function show(field: HTMLElement, shown: boolean): void {
  field.parentElement!.hidden = !shown;
}
