// What can be claimed, now or when it is due: one range read gives the next items of a queue.
function (doc) {
  if (doc.type !== 'WorkItem' || doc.claimed || doc.status) return;
  var rank = typeof doc.priority === 'number' ? 9 - doc.priority : 9;
  // A spoilt date sorts first: the consumer that meets it sets the item aside.
  var date = doc.date === null || doc.date === undefined ? doc.published : doc.date;
  emit([doc.queue, rank, typeof date === 'number' ? date : 0], null);
}
