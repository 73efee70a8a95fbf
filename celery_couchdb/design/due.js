// What housekeeping has to look at, and from when on: what expires, with its revision, and chords, which may be unfinished.
function (doc) {
  if (/^(Result|Group|Value|Chord|Part)$/.test(doc.type)) {
    if (typeof doc.expires === 'number') {
      emit(doc.expires, doc._rev);
    }
    if (doc.type === 'Chord' && doc.size) {
      emit(doc.date + 30, null);
    }
  }
}
