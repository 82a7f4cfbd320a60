// npm's redlock and redis-semaphore on ioredis, told what to do by `src/worker.rs`. The packages are
// found through NODE_PATH.
'use strict'

const readline = require('readline')

const fail = (error) => {
  console.log('error: ' + String(error.message || error).split('\n')[0])
  process.exit(1)
}
process.on('uncaughtException', fail)
process.on('unhandledRejection', fail)

const Redis = require('ioredis')

const TTL = 10000
const [rival, port] = [process.argv[2], Number(process.argv[3])]
const client = () => new Redis(port, '127.0.0.1')

// A client for each contender, as in a process of its own.
const makers = {
  'npm redlock': {
    version: () => require('redlock/package.json').version,
    setting: 'defaults: looks again after 200 ms ± 100 ms',
    make: (mutex) => {
      const Redlock = require('redlock')
      const connection = client()
      // Its defaults, but without an end.
      const manager = new Redlock([connection], { retryCount: -1 })
      let lock
      return {
        lock: async () => { lock = await manager.lock('npm-redlock-' + mutex, TTL) },
        unlock: () => lock.unlock(),
        close: () => connection.disconnect()
      }
    }
  },
  'npm redis-semaphore': {
    version: () => require('redis-semaphore/package.json').version,
    setting: 'defaults: looks again every 10 ms',
    make: (mutex) => {
      const { Mutex } = require('redis-semaphore')
      const connection = client()
      // Its defaults, but without an end.
      const lock = new Mutex(connection, 'npm-semaphore-' + mutex, { lockTimeout: TTL, acquireTimeout: 600000 })
      return {
        lock: () => lock.acquire(),
        unlock: () => lock.release(),
        close: () => connection.disconnect()
      }
    }
  }
}

const { version, setting, make } = makers[rival]
const now = () => Number(process.hrtime.bigint()) / 1e3
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

async function cycles (count) {
  const alone = make('alone')
  const took = []
  for (let number = 0; number <= count; number++) {
    const began = now()
    await alone.lock()
    await alone.unlock()
    took.push(now() - began)
  }
  alone.close()
  return took.slice(1)
}

async function handOffs (holds) {
  const [owner, waiter] = [make('handed-over'), make('handed-over')]
  const took = []
  for (const hold of holds) {
    await owner.lock()
    const waited = waiter.lock().then(now)
    await sleep(hold / 1e3)
    const began = now()
    await owner.unlock()
    took.push(await waited - began)
    await waiter.unlock()
  }
  owner.close()
  waiter.close()
  return took
}

async function eight (settle, seconds) {
  const counts = new Array(8).fill(0)
  let [counting, over] = [false, false]
  const all = counts.map(async (_, number) => {
    const contender = make('eight')
    while (!over) {
      await contender.lock()
      if (counting) counts[number]++
      await contender.unlock()
    }
    contender.close()
  })
  await sleep(settle * 1e3)
  counting = true
  await sleep(seconds * 1e3)
  counting = false
  over = true
  await Promise.all(all)
  return counts
}

async function main () {
  console.log(version() + '\t' + setting)
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [order, ...words] = line.split(' ')
    const numbers = words.map(Number)
    const orders = { cycles: () => cycles(numbers[0]), handoffs: () => handOffs(numbers), eight: () => eight(...numbers) }
    console.log((await orders[order]()).join(' '))
  }
  process.exit(0)
}

main().catch(fail)
