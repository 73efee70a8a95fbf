// Everything that a sweep needs, in one request grouped by the first two parts of the key: until when each consumer's
// lease lasts, how many claims each consumer has (and in which queues), how many slots of concurrency keys, how many
// messages wait for such slots (and for which keys), when the first message expires that a sweep deletes (see the view
// `expiring`), how many messages of failed tasks are kept, which queues expire, and which queues have limits. Numbers are
// bounded: _stats squares them, and an overflow would break the whole view.
// Rows: ['claim', consumer, encoded queue] = date of the claim; ['expiry', null] = time of the expiry; ['failed', null,
// time] = time of the failure; ['consumer', consumer] = end of the lease; ['slot', consumer] = date; ['parked', null, encoded key, HIGHEST - priority, date of the
// message] = date; ['queue', encoded queue] = time of the expiry; ['limit', encoded queue] = 0.
function (doc) {
  function name(queue) { return typeof queue === 'string' ? encodeURIComponent(queue) : queue; }
  function seconds(value) { return typeof value === 'number' ? Math.max(-1e12, Math.min(1e12, value)) : 0; }
  if (doc.type === 'WorkItem' && !doc.status) {
    var headers = doc.message && doc.message.headers || {};
    var revocable = typeof headers.id === 'string' && typeof headers.expires === 'string';
    if (doc.claimed && typeof doc.claimed.by === 'string') emit(['claim', doc.claimed.by, name(doc.queue)], seconds(doc.claimed.date));
    else {
      if (doc.parked && typeof doc.parked.key === 'string') {
        var rank = typeof doc.priority === 'number' ? HIGHEST - Math.max(0, Math.min(HIGHEST, Math.floor(doc.priority))) : HIGHEST;
        var date = seconds(typeof doc.date === 'number' ? doc.date : doc.published);
        emit(['parked', null, name(doc.parked.key), rank, date], date);
      }
      if (typeof doc.expires === 'number' && !revocable) emit(['expiry', null], seconds(doc.expires));
    }
  } else if (doc.type === 'DoneItem' || (doc.type === 'WorkItem' && doc.error)) {
    if (typeof doc.expires === 'number') emit(['expiry', null], seconds(doc.expires));
    if (doc.type === 'WorkItem') emit(['failed', null, seconds(doc.failed)], seconds(doc.failed));
  } else if (doc.type === 'Consumer') {
    emit(['consumer', doc._id], seconds(doc.expires));
  } else if (doc.type === 'Slot') {
    if (typeof doc.by === 'string') emit(['slot', doc.by], seconds(doc.date));
  } else if (doc.type === 'Queue' && typeof doc.name === 'string') {
    if (doc.expires) emit(['queue', name(doc.name)], seconds(doc.expires));
    var limits = doc.arguments || {};
    if (typeof limits['x-message-ttl'] === 'number' || typeof limits['x-max-length'] === 'number') emit(['limit', name(doc.name)], 0);
  }
}
