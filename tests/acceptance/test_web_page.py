"""The page of operators in a real browser, with a real worker at work."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip('starlette')

from celery_couchdb.contrib.beat import Schedules
from celery_couchdb.failures import Failures
from celery_couchdb.web import create_app
from kombu_couchdb.admin import queues
from kombu_couchdb.admin.jobs import find
from kombu_couchdb.documents import dead_letter
from tests.browser import Page
from tests.conftest import wait_for
from tests.web import served

from .conftest import Site

HOSTILE = '<img src=x onerror="window.attacked = 1">'

#: The contrast of the texts with their backgrounds: the smallest ratio on the page, and where it is.
CONTRAST = """(() => {
  const parse = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return {rgb: [r, g, b], a};
  };
  const light = rgb => rgb.map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const {rgb, a} = parse(getComputedStyle(node).backgroundColor);
      if (a === 1) return rgb;
    }
    return [255, 255, 255];
  };
  let least = [99, ''];
  for (const node of document.querySelectorAll('body *')) {
    const text = Array.from(node.childNodes).filter(n => n.nodeType === 3).map(n => n.nodeValue.trim()).join('');
    if (!text || !node.checkVisibility() || node.disabled || node.offsetWidth < 2) continue;
    const [a, b] = [parse(getComputedStyle(node).color).rgb, behind(node)].map(light).sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < least[0]) least = [ratio, node.outerHTML.slice(0, 200)];
  }
  return least;
})()"""

#: Whether the first row of each table stays in its place when it is selected.
STAYS = """Array.from(document.querySelectorAll('form.selection')).every(form => {
  const box = form.querySelector('tbody input');
  const places = [0, 1, 2].map(() => { const {top} = box.getBoundingClientRect(); box.click(); return top; });
  box.click();
  return places.every(place => place === places[0]);
})"""

#: The names that two buttons or boxes that can be seen share.
SHARED = """(() => {
  const names = Array.from(document.querySelectorAll('button, .button, [type=checkbox]'))
    .filter(node => node.checkVisibility({visibilityProperty: true}))
    .map(node => node.ariaLabel || node.labels?.[0]?.innerText || node.innerText);
  return names.filter((name, at) => names.indexOf(name) < at);
})()"""


@pytest.fixture
def page(site: Site, stack: ExitStack, tmp_path: Path) -> Page:
    """A browser that shows the queues of a site to its administrator."""
    site.set_up()
    site.send('add', 1, 1, queue='elsewhere')
    site.send('add', 1, 1, queue=HOSTILE)
    url = stack.enter_context(served(create_app(site.app)))
    page = Page(tmp_path / 'profile', 'about:blank')
    stack.callback(page.close)
    page.visit(url)
    log_in(page, site)
    return page


def log_in(page: Page, site: Site) -> None:
    page.fill('#user', site.server.user)
    page.fill('#password', site.server.password)
    page.submit('button')


def ready(page: Page, queue: str) -> str:
    """Return the number of ready messages in the row of a queue; '' without one."""
    script = (
        f"Array.from(document.querySelectorAll('tbody tr')).find(row => row.innerText.includes({json.dumps(queue)}))"
    )
    found: Any = page.run(f"(({script}) || document.createElement('p')).querySelector('[data-title=Ready]')?.innerText")
    return found or ''


def test_numbers_change_in_place(site: Site, page: Page) -> None:
    assert ready(page, 'elsewhere') == '1'
    page.run("window.isSame = true; document.querySelector('input[name=select]').click()")
    page.run(
        """new MutationObserver(found => { window.marked ||= found.some(one => one.target.matches('.changed')); })
        .observe(document.body, {subtree: true, attributes: true})"""
    )
    for _ in range(2):
        site.send('add', 1, 1, queue='elsewhere')
    wait_for(lambda: ready(page, 'elsewhere') == '3', 'the number to change')
    site.worker('-Q', 'elsewhere', '-n', 'w1@%h')
    wait_for(lambda: ready(page, 'elsewhere') == '0', 'the worker to run the tasks')
    # The page was not loaded again, what was selected still is, and what has changed was marked.
    assert page.run('[window.isSame, window.marked]') == [True, True]
    assert page.text('[data-selected]') == '1 selected'
    page.visit(page.run('location.origin') + '/workers')
    assert 'elsewhere' in page.text('main')
    assert page.run('window.attacked') is None


def test_pause_and_resume_by_keyboard(site: Site, page: Page) -> None:
    def tab_to(selector: str) -> None:
        for _ in range(60):
            if page.run(f'document.activeElement.matches({json.dumps(selector)})'):
                # What has the focus can be seen.
                assert page.run('getComputedStyle(document.activeElement).outlineStyle') != 'none'
                return
            page.press('Tab', 9)
        pytest.fail(f'no way to {selector}')

    page.press('Tab', 9)
    assert page.text(':focus') == 'Skip to the content'
    tab_to('input[aria-label="Select elsewhere"]')
    page.press(' ', 32, ' ')
    page.run("document.querySelector('#main').focus()")
    tab_to('button[value=pause]')
    page.press('Enter', 13, '\r')
    page.wait(lambda: page.text('h1') == 'Pause the queue elsewhere?', 'the question')
    assert page.run('document.activeElement.id') == 'reason'
    page.run("document.execCommand('insertText', false, 'the shop moves')")
    page.press('Enter', 13, '\r')
    page.wait(lambda: '1 queue paused.' in page.text('main'), 'the pause')
    assert 'the shop moves' in page.text('table')
    assert queues.paused(site.client)['elsewhere']['by'] == site.server.user


def fail(site: Site, task_id: str) -> None:
    """Keep a failure with hostile texts."""
    site.send('x' * 200, HOSTILE, 'y' * 2000, task_id=task_id, queue='elsewhere', root_id='x' * 100)
    [doc] = find(site.client, task_id)
    error: Any = {'type': 'ValueError', 'text': HOSTILE + 'e' * 500, 'traceback': f'{HOSTILE}\n{"t" * 500}'}
    error |= {'worker': HOSTILE, 'retries': 3}
    site.client.put(dead_letter.failed(doc, error, 1e6, site.client.clock.now()))


def retry(site: Site, task_id: str) -> None:
    """Retry a failure."""
    failures = Failures(site.app)
    failures.retry(failures.find([task_id]))


def test_failures_are_retried_while_new_ones_come(site: Site, page: Page) -> None:
    """A list does not jump: retried failures become pale, new ones are counted, and open documents stay open."""
    fail(site, 'first')
    page.visit(page.run('location.origin') + '/failures')
    fail(site, 'second')
    retry(site, 'first')
    page.wait(lambda: '1 new failure' in (page.text('#new') or ''), 'the new failure')
    assert page.run("document.querySelectorAll('#list tr.gone').length") == 1
    assert 'second' not in page.text('#list')
    page.visit(page.run('location.origin') + '/tasks/second')
    page.run("document.querySelector('details').open = true")
    site.send('add', 1, 1, queue='elsewhere')
    retry(site, 'second')
    page.wait(lambda: 'ready' in page.text('.where'), 'the retry')
    assert page.run("document.querySelector('details').open")


@pytest.mark.parametrize('dark', [False, True], ids=['light', 'dark'])
def test_looks(site: Site, page: Page, dark: bool) -> None:
    queues.pause(site.client, 'x' * 200, by='ann', reason='a reason ' * 30)
    site.send('x' * 200, HOSTILE, 'y' * 2000, queue='elsewhere')
    fail(site, 'x' * 200)
    Schedules(site.app).add(HOSTILE + 'x' * 150, 'x' * 200, {'crontab': '0 4 1-7 * mon'})
    paths = ('/queues', '/jobs', '/jobs?since=soon', '/failures', '/schedules', '/workers', '/tasks', '/system')
    for path in (*paths, '/activity', f'/tasks/{"x" * 200}', '/nothing', '/login'):
        for width in (390, 860, 1280, 1600):
            page.show(width, dark=dark)
            page.visit(page.run('location.origin') + path)
            assert page.run('document.documentElement.scrollWidth <= innerWidth'), (path, width)
            ratio, where = page.run(CONTRAST)
            assert ratio >= 4.5, (path, ratio, where)
            assert page.run(STAYS), (path, width)
            assert page.run(SHARED) == [], (path, width)
            tab = 'document.querySelector("nav [aria-current]")?.getBoundingClientRect()'
            assert page.run(f'!({tab}) || (({tab}).left >= 0 && ({tab}).right < innerWidth + 1)'), (path, width)
            if (path, width) == ('/failures', 390):
                assert not page.run("document.querySelector('.filter .fields').checkVisibility()")
                assert page.run("document.querySelector('#list tbody tr').offsetHeight") < 100
    assert page.run('window.attacked') is None


def test_without_scripts(site: Site, page: Page) -> None:
    page.turn_scripts_off()
    page.visit(page.run('location.href'))
    assert ready(page, 'elsewhere') == '1'
    page.run("document.querySelectorAll('input[name=select]').forEach(box => { box.checked = true; })")
    page.submit('button[value=purge]')
    assert page.text('h1') == 'Purge these 2 queues with 2 messages?'
    page.submit('button.primary')
    assert '2 messages deleted' in page.text('main')
    assert ready(page, 'elsewhere') == '0'
    page.visit(page.run('location.origin') + '/schedules')
    page.submit('button[value=add]')
    labels = "Array.from(document.querySelectorAll('.of-kind label'))"
    shown = f'{labels}.filter(one => one.offsetParent).map(one => one.innerText)'
    assert page.run(shown) == ['Every']
    page.run("document.querySelector('[name=kind]').value = 'crontab'")
    assert page.run(shown) == ['Crontab', 'Time zone']


def test_session_ends_while_the_page_is_open(site: Site, page: Page) -> None:
    form = "new URLSearchParams(new FormData(document.querySelector('.who form')))"
    page.run(
        f"void fetch('/logout', {{method: 'POST', body: {form}}})"
    )  # The page may leave before its answer is there.
    page.wait(lambda: page.text('h1') == 'Log in', 'the login')
    log_in(page, site)
    assert page.text('h1') == 'Queues'


def test_list_of_jobs_does_not_jump(site: Site, page: Page) -> None:
    for number in range(2):
        site.send('add', number, 1, queue='elsewhere')
    page.visit(page.run('location.origin') + '/jobs?queue=elsewhere')
    rows = "Array.from(document.querySelectorAll('tbody tr'))"
    ids = page.run(f'{rows}.map(row => row.id)')
    site.worker('-Q', 'elsewhere', '-n', 'w1@%h')
    page.wait(lambda: page.run(f"{rows}.every(row => row.matches('.gone'))"), 'the jobs to end')
    assert page.run(f'{rows}.map(row => row.id)') == ids
    assert len(ids) == 3
    site.send('add', 1, 1, queue='elsewhere', countdown=3600)
    page.wait(lambda: page.text('main').count('1 new job: show the list as it is now'), 'the news')
    page.run("document.querySelector('#new a').click()")
    page.wait(lambda: page.run(f'{rows}.length') == 1, 'the new list')
