// A Curator peer: takes turns at one path with LeaderLatch, and says so on standard output.
// Arguments: servers, path, id, session timeout in ms, link to the owner's id, there while a peer owns.

import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.leader.LeaderLatch;
import org.apache.curator.retry.RetryForever;

public class Latch {
    public static void main(String[] args) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(
            args[0], Integer.parseInt(args[3]), 5000, new RetryForever(50));
        client.start();
        Path owned = Path.of(args[4]);
        System.out.println("ready");
        while (true) {
            try (LeaderLatch latch = new LeaderLatch(client, args[1], args[2])) {
                latch.start();
                latch.await();
                boolean made = false;
                try {
                    Files.createSymbolicLink(owned, Path.of(args[2]));
                    made = true;
                } catch (FileAlreadyExistsException exception) {
                    System.out.println("overlap " + args[2]);
                }
                Thread.sleep(2);
                boolean still = latch.hasLeadership();
                if (made) {
                    Files.deleteIfExists(owned);
                }
                System.out.println(still ? "turn" : "lost");
            }
        }
    }
}
