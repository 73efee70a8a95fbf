// Documents that housekeeping must look at, and from when on: expired documents, and chords that may be unfinished. The
// document ids are checked, too, because another application's document with the same type must not be deleted.
// Row: key = date, value = [type, or 'Unfinished', revision].
function (doc) {
  var ours = { Result: 'celery-task-meta-', Group: 'celery-taskset-meta-', Chord: 'chord-unlock-', Part: 'chord-unlock-' };
  if (typeof doc.type === 'string' && ours.hasOwnProperty(doc.type) && doc._id.indexOf(ours[doc.type]) >= 0) {
    if (typeof doc.expires === 'number') {
      emit(doc.expires, [doc.type, doc._rev]);
    }
    if (doc.type === 'Chord' && doc.body && typeof doc.date === 'number') {
      emit(doc.date + 30, ['Unfinished', doc._rev]);
    }
  }
}
