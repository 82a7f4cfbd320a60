// Curator's InterProcessMutex, told what to do by src/worker.rs. The jars are found through the class path.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.StringJoiner;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.SynchronousQueue;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

public class Curator {
    static String address;
    static InterProcessMutex alone;
    static volatile boolean counting, over;

    // A client for each contender, as in a process of its own.
    static InterProcessMutex lock(String mutex) {
        CuratorFramework client =
            CuratorFrameworkFactory.newClient(address, 10_000, 10_000, new ExponentialBackoffRetry(1000, 3));
        client.start();
        return new InterProcessMutex(client, "/curator-" + mutex);
    }

    static double[] cycles(int count) throws Exception {
        if (alone == null) {
            alone = lock("alone");
        }
        double[] took = new double[count];
        for (int number = -1; number < count; number++) {
            long began = System.nanoTime();
            alone.acquire();
            alone.release();
            if (number >= 0) {
                took[number] = (System.nanoTime() - began) / 1e3;
            }
        }
        return took;
    }

    static double[] handOffs(double[] holds) throws Exception {
        InterProcessMutex owner = lock("handed-over"), waiter = lock("handed-over");
        SynchronousQueue<Boolean> go = new SynchronousQueue<>();
        SynchronousQueue<Long> done = new SynchronousQueue<>();
        start(() -> {
            while (go.take()) {
                waiter.acquire();
                long at = System.nanoTime();
                waiter.release();
                done.put(at);
            }
        });
        double[] took = new double[holds.length];
        // The first pays for the connections.
        for (int number = -1; number < holds.length; number++) {
            owner.acquire();
            go.put(true);
            double hold = number < 0 ? 20_000 : holds[number];
            Thread.sleep((long) hold / 1000, (int) (hold % 1000) * 1000);
            long began = System.nanoTime();
            owner.release();
            double micros = (done.take() - began) / 1e3;
            if (number >= 0) {
                took[number] = micros;
            }
        }
        go.put(false);
        return took;
    }

    static double[] eight(double settle, double span) throws Exception {
        double[] counts = new double[8];
        counting = over = false;
        CountDownLatch begin = new CountDownLatch(1);
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < 8; number++) {
            int mine = number;
            InterProcessMutex contender = lock("eight");
            threads.add(start(() -> {
                begin.await();
                while (!over) {
                    contender.acquire();
                    if (counting) {
                        counts[mine]++;
                    }
                    contender.release();
                }
            }));
        }
        begin.countDown();
        Thread.sleep((long) (settle * 1e3));
        counting = true;
        Thread.sleep((long) (span * 1e3));
        counting = false;
        over = true;
        for (Thread thread : threads) {
            thread.join();
        }
        return counts;
    }

    interface Work {
        void run() throws Exception;
    }

    static Thread start(Work work) {
        Thread thread = new Thread(() -> {
            try {
                work.run();
            } catch (Exception exception) {
                fail(exception);
            }
        });
        thread.setDaemon(true);
        thread.start();
        return thread;
    }

    static void fail(Exception exception) {
        System.out.println("error: " + exception.toString().lines().findFirst().orElse("?"));
        System.exit(1);
    }

    public static void main(String[] arguments) throws Exception {
        address = arguments[0];
        String jar = InterProcessMutex.class.getProtectionDomain().getCodeSource().getLocation().getPath();
        String version = java.nio.file.Path.of(jar).toRealPath().getFileName().toString();
        version = version.replaceAll("^curator-recipes-?|\\.jar$", "");
        System.out.println(version + "\tdefaults: watches the node before its own");
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = orders.readLine()) != null; ) {
            String[] words = line.split(" ");
            double[] numbers = Arrays.stream(words).skip(1).mapToDouble(Double::parseDouble).toArray();
            double[] answer = words[0].equals("cycles") ? cycles((int) numbers[0])
                : words[0].equals("handoffs") ? handOffs(numbers) : eight(numbers[0], numbers[1]);
            StringJoiner text = new StringJoiner(" ");
            for (double number : answer) {
                text.add(String.valueOf(number));
            }
            System.out.println(text);
        }
        System.exit(0);
    }
}
