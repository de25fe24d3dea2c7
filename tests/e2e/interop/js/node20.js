// What js-libp2p takes from Node 22 and Node 20 lacks.

Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new this((a, b) => { [resolve, reject] = [a, b] })
  return { promise, resolve, reject }
}
