// What housekeeping has to look at, and from when on: what expires, with its revision, and chords, which may be unfinished.
// The ids are looked at, too: a document that only happens to have the same type must not be deleted.
function (doc) {
  var ours = { Result: 'celery-task-meta-', Group: 'celery-taskset-meta-', Chord: 'chord-unlock-', Part: 'chord-unlock-' };
  if (typeof doc.type === 'string' && ours.hasOwnProperty(doc.type) && doc._id.indexOf(ours[doc.type]) >= 0) {
    if (typeof doc.expires === 'number') {
      emit(doc.expires, doc._rev);
    }
    if (doc.type === 'Chord' && doc.size && typeof doc.date === 'number') {
      emit(doc.date + 30, null);
    }
  }
}
