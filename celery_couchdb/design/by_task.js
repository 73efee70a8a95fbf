// Results by task name, state and time; grouped to level 2, how many of each.
function (doc) {
  if (doc.type === 'Result') {
    emit([doc.task, doc.status, doc.date], null);
  }
}
