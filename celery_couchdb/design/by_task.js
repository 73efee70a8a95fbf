// Results by task name, state and time. With group_level=2: the number of results for each task and state.
// Row: key = [name of the task, state, date, or 0 if that is no number], value = null.
function (doc) {
  if (doc.type === 'Result') {
    emit([doc.task, doc.status, typeof doc.date === 'number' ? doc.date : 0], null);
  }
}
