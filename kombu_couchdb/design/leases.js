// All that a sweep needs in one grouped read: who lives until when, who holds how many claims, which queues may go.
function (doc) {
  function seconds(value) { return typeof value === 'number' ? value : 0; }
  if (doc.type === 'WorkItem' && doc.claimed && typeof doc.claimed.by === 'string' && !doc.status) {
    emit(['claim', doc.claimed.by], seconds(doc.claimed.date));
  } else if (doc.type === 'Consumer') {
    emit(['consumer', doc._id], seconds(doc.expires));
  } else if (doc.type === 'Queue' && doc.expires) {
    emit(['queue', doc.name], seconds(doc.expires));
  }
}
