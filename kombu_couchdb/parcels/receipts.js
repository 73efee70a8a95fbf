// Receipts of parcels: those whose tasks may still run, and when each may be deleted.
// Row: key = ["open", id], value = the task's id, or null if it is none; key = ["kept", kept_until], value = [winning revision, …other leaf
// revisions].
function (doc) {
  if (doc.type !== 'Receipt') return;
  var isId = typeof doc.id === 'string' && doc.id.length <= 510; // 255 characters: a rare one counts twice here
  if (doc.done === undefined) emit(['open', doc._id], isId ? doc.id : null);
  var until = typeof doc.kept_until === 'number' && isFinite(doc.kept_until) ? doc.kept_until : 0;
  emit(['kept', until], [doc._rev].concat(doc._conflicts || []));
}
