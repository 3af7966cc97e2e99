// Messages that arrive in parts, or never; no memory is reserved for bytes that are only announced.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>
#include <thread>

#include "comm/rendezvous/server_connection.h"

namespace tandem::test {
namespace {

using namespace control;

std::vector<std::byte> bytes_of(const Header& header, const std::string& payload = "") {
  const auto head = std::as_bytes(std::span(&header, 1));
  std::vector<std::byte> bytes(head.begin(), head.end());
  for (const char c : payload) bytes.push_back(std::byte(c));
  return bytes;
}

TEST(Inbox, AssemblesMessagesFromParts) {
  std::vector<std::byte> stream;
  for (int i = 0; i < 5; ++i) {
    const auto bytes =
        bytes_of({Kind::all, i, 7, 2, uint32_t(i)}, "ab" + std::string(size_t(i), 'x'));
    stream.insert(stream.end(), bytes.begin(), bytes.end());
  }
  for (size_t chunk = 1; chunk < stream.size(); ++chunk) {
    Inbox inbox;
    int taken = 0;
    for (size_t at = 0; at < stream.size(); at += chunk) {
      inbox.append(std::span(stream).subspan(at, std::min(chunk, stream.size() - at)));
      Message message;
      while (inbox.take(message)) {
        EXPECT_EQ(message.header.rank, taken);
        EXPECT_EQ(text_of(message), "ab" + std::string(size_t(taken), 'x'));
        ++taken;
      }
    }
    EXPECT_EQ(taken, 5);
    EXPECT_FALSE(inbox.damaged());
  }
}

TEST(Inbox, InvalidHeaderEndsTheInbox) {
  for (const Header& header : {Header{Kind::blob, 0, 0, kMaxNameBytes + 1, 0},
                               Header{Kind::blob, 0, 0, 0, kMaxBlobBytes + 1},
                               Header{Kind::blob, 0, 0, ~0u, ~0u}, Header{Kind(99), 0, 0, 0, 0}}) {
    Inbox inbox;
    inbox.append(bytes_of(header));
    EXPECT_TRUE(inbox.damaged());
    Message message;
    EXPECT_FALSE(inbox.take(message));
  }
}

struct Ends {
  ServerConnection connection;
  Connection server;
};
Ends ends(int buffer = 0) {
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
  if (buffer > 0) setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
  return {{1, Connection(fds[0])}, Connection(fds[1])};
}

TEST(ServerConnection, ServerThatStopsMidMessageTimesOut) {
  auto [connection, server] = ends();
  const auto bytes = bytes_of({Kind::all, 0, 0, 0, 1000}, "the beginning");
  ASSERT_EQ(send(server.fd(), bytes.data(), bytes.size(), 0), ssize_t(bytes.size()));
  Message message;
  const auto begin = Clock::now();
  EXPECT_EQ(connection.receive(message, 0.2), ServerConnection::Received::timeout);
  connection.look_for_abort();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(60));
  server.close();
  EXPECT_EQ(connection.receive(message, 5), ServerConnection::Received::gone);
  EXPECT_THROW(connection.look_for_abort(), Aborted);
}

TEST(ServerConnection, ServerThatReadsNothingTimesOut) {
  auto [connection, server] = ends(4096);
  const std::vector<std::byte> blob(1 << 20);
  const Header header{Kind::blob, 1, 0, 0, uint32_t(blob.size())};
  const auto begin = Clock::now();
  EXPECT_FALSE(connection.send(0.2, header, {}, blob));
  EXPECT_FALSE(connection.send(0.2, {Kind::bye, 1, 0, 0, 0}));  // it would continue the blob
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(60));
}

TEST(ServerConnection, AbortArrivesAfterTheMessageBeforeIt) {
  auto [connection, server] = ends();
  for (const auto& bytes :
       {bytes_of({Kind::all, 0, 0, 0, 2}, "ab"), bytes_of({Kind::abort, 3, 0, 0, 3}, "why")}) {
    ASSERT_EQ(send(server.fd(), bytes.data(), bytes.size(), 0), ssize_t(bytes.size()));
  }
  connection.look_for_abort();
  Message message;
  EXPECT_EQ(connection.receive(message, 5), ServerConnection::Received::message);
  EXPECT_EQ(text_of(message), "ab");
  try {
    connection.look_for_abort();
    ADD_FAILURE() << "no abort";
  } catch (const Aborted& error) {
    EXPECT_EQ(error.origin, 3);
  }
  EXPECT_THROW(connection.receive(message, 0), Aborted);
}

}  // namespace
}  // namespace tandem::test
