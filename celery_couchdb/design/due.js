// What housekeeping has to look at, and from when on: what expires, and chords, which may be unfinished; each with its
// revision. The ids are looked at, too: a document that only happens to have the same type must not be deleted.
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
