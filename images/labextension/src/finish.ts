import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, type ICommandPalette, ToolbarButton } from '@jupyterlab/apputils';
import type { IMainMenu } from '@jupyterlab/mainmenu';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { Contents } from '@jupyterlab/services';
import { Widget } from '@lumino/widgets';

import type { ISubmitted } from './answer';
import { Form } from './form';
import { type Session, home } from './session';
import { make } from './words';

const COMMAND = 'gpuspawner:finish';
const LABEL = 'Finish without me';
const CAPTION = 'Run this notebook from the top with GPUs of its own, without this session';

interface IPlaces {
  tracker: INotebookTracker;
  palette: ICommandPalette | null;
  menu: IMainMenu | null;
}

/** Add the command to a notebook's toolbar and context menu, the Run menu and the palette. */
export function addFinish(app: JupyterFrontEnd, session: Session, places: IPlaces): void {
  const { tracker, palette, menu } = places;
  app.commands.addCommand(COMMAND, {
    label: LABEL,
    caption: CAPTION,
    isEnabled: () => tracker.currentWidget !== null,
    execute: () => tracker.currentWidget && finish(app, session, tracker.currentWidget)
  });
  tracker.currentChanged.connect(() => app.commands.notifyCommandChanged(COMMAND));
  palette?.addItem({ command: COMMAND, category: 'Notebook Operations' });
  menu?.runMenu.addGroup([{ command: COMMAND }], 900);
  app.contextMenu.addItem({ command: COMMAND, selector: '.jp-Notebook', rank: 900 });
  app.docRegistry.addWidgetExtension('Notebook', {
    createNew: (panel: NotebookPanel) => {
      const onClick = () => void finish(app, session, panel);
      const button = new ToolbarButton({ label: LABEL, tooltip: CAPTION, onClick });
      panel.toolbar.insertItem(10, 'gpuspawner-finish', button);
      return button;
    }
  });
}

/** Save the notebook, ask what its run needs, submit it, and show the result. */
async function finish(app: JupyterFrontEnd, session: Session, panel: NotebookPanel): Promise<void> {
  const { contents, serverSettings } = app.serviceManager;
  const form = new Form(serverSettings, contents.localPath(panel.context.path), session);
  const dialog = new FinishDialog(form);
  // Before the dialog: JupyterLab itself may have to ask, or to say why it cannot save.
  if (!(await save(panel))) {
    return;
  }
  const closed = dialog.launch();
  await form.begin(isChanged(panel, contents));
  await closed;
  if (!form.submitted) {
    return;
  }
  const page = session.now ? `${session.now.page}runs` : '';
  const refusal = form.stops ? await session.act('end') : '';
  if (form.stops && !refusal) {
    window.location.href = page || home();
    return;
  }
  const result = new Dialog({
    title: 'The run is submitted',
    body: told(form.submitted, page, refusal, path => {
      result.resolve();
      void app.commands.execute('filebrowser:go-to-path', { path });
    }),
    buttons: [Dialog.okButton({ label: 'Close' })]
  });
  await result.launch();
}

/** Save the changes, if that is allowed. Return false if JupyterLab has told why it failed. */
async function save({ context }: NotebookPanel): Promise<boolean> {
  if (!context.model.dirty || isReadOnly(context)) {
    return true;
  }
  let state = '';
  const note = (_: unknown, now: string) => {
    state = now;
  };
  context.saveState.connect(note);
  try {
    await context.save();
  } catch {
    return false; // cancelled
  } finally {
    context.saveState.disconnect(note);
  }
  return state !== 'failed';
}

/** Return true if a notebook that cannot be saved differs from its file. */
async function isChanged({ context }: NotebookPanel, contents: Contents.IManager): Promise<boolean> {
  if (!context.model.dirty || !isReadOnly(context)) {
    return false;
  }
  // A kernel's information about itself is enough to make a notebook dirty.
  const saved = await contents.get(context.path, { type: 'notebook', content: true });
  return sources(saved.content) !== sources(context.model.toJSON());
}

function isReadOnly(context: NotebookPanel['context']): boolean {
  return context.contentsModel?.writable === false;
}

function sources(notebook: unknown): string {
  const { cells } = notebook as { cells: { source: string | string[] }[] };
  return JSON.stringify(cells.map(cell => [cell.source].flat().join('')));
}

/** Asks what the run needs. It stays open until the run is accepted. */
class FinishDialog extends Dialog<void> {
  constructor(private form: Form) {
    super({
      title: LABEL,
      body: form,
      buttons: [Dialog.cancelButton(), Dialog.okButton({ label: 'Submit' })]
    });
    this.addClass('gpuspawner-finish');
    form.changed.connect(this.tell, this);
    this.tell();
  }

  resolve(index?: number): void {
    if (index === 0) {
      super.resolve(index); // the button Cancel
    } else if (this.form.isReady) {
      void this.form.submit().then(accepted => accepted && super.resolve(1));
    }
  }

  private tell(): void {
    // A disabled button would lose the focus, and with it the keys.
    const button = this.node.querySelector('.jp-mod-accept');
    button?.setAttribute('aria-disabled', String(!this.form.isReady));
  }
}

/** The result, with links to the run. */
function told(run: ISubmitted, page: string, refusal: string, open: (path: string) => void): Widget {
  const body = new Widget();
  body.addClass('gpuspawner-told');
  const folder = make('p', '', 'Its output appears in ');
  if (run.open) {
    const link = make('a', '', run.folder) as HTMLAnchorElement;
    link.href = '#';
    link.addEventListener('click', event => {
      event.preventDefault();
      open(run.open);
    });
    folder.append(link);
  } else {
    folder.append(run.folder);
  }
  body.node.append(
    make('p', '', `${run.id} starts by itself. It needs neither this page nor this server.`),
    folder
  );
  if (page) {
    const link = make('a', '', 'Follow it on the page Runs') as HTMLAnchorElement;
    Object.assign(link, { href: page, target: '_blank', rel: 'noopener' });
    body.node.append(link);
  }
  if (refusal) {
    body.node.append(make('p', 'gpuspawner-warning', `This server still runs. ${refusal}`));
  }
  return body;
}
