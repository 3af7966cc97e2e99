// Messages that arrive in parts, or never; no memory is reserved for bytes that are only announced.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "comm/rendezvous/store_client.h"
#include "comm/rendezvous/store_protocol.h"
#include "tandem/error.h"

namespace tandem::test {
namespace {

using namespace control;

std::vector<std::byte> stream_of(const Header& header, const std::string& payload = "") {
  const auto head = std::as_bytes(std::span(&header, 1));
  std::vector<std::byte> bytes(head.begin(), head.end());
  for (const char c : payload) bytes.push_back(std::byte(c));
  return bytes;
}

TEST(Inbox, AssemblesMessagesFromParts) {
  std::vector<std::byte> stream;
  for (int i = 0; i < 5; ++i) {
    const auto bytes =
        stream_of({Kind::reply, i, 7, 2, uint32_t(i)}, "ab" + std::string(size_t(i), 'x'));
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
        EXPECT_EQ(text_of(message.payload), "ab" + std::string(size_t(taken), 'x'));
        ++taken;
      }
    }
    EXPECT_EQ(taken, 5);
    EXPECT_FALSE(inbox.damaged());
  }
}

TEST(Inbox, InvalidHeaderEndsTheInbox) {
  for (const Header& header : {Header{Kind::set, 0, 0, kMaxNameBytes + 1, 0},
                               Header{Kind::set, 0, 0, 0, kMaxBlobBytes + 1},
                               Header{Kind::set, 0, 0, ~0u, ~0u}, Header{Kind(99), 0, 0, 0, 0}}) {
    Inbox inbox;
    inbox.append(stream_of(header));
    EXPECT_TRUE(inbox.damaged());
    Message message;
    EXPECT_FALSE(inbox.take(message));
  }
}

struct Ends {
  std::unique_ptr<StoreClient> client;
  Connection store;
};
Ends make_ends(double stall_s = StoreClient::kStallSeconds, int buffer = 0) {
  std::array<int, 2> fds{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds.data()), 0);
  if (buffer > 0) setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
  return {std::make_unique<StoreClient>(1, Connection(fds[0]), stall_s), Connection(fds[1])};
}

void write_to(const Connection& store, const std::vector<std::byte>& bytes) {
  ASSERT_EQ(send(store.fd(), bytes.data(), bytes.size(), 0), ssize_t(bytes.size()));
}

void ignore(const Event&) {}

TEST(StoreClient, StoreThatStopsMidMessageTimesOut) {
  auto [client, store] = make_ends();
  const auto sum = client->add("n", 1);
  write_to(store, stream_of({Kind::reply, 0, 1, 0, 1000}, "the beginning"));
  const auto begin = Clock::now();
  EXPECT_FALSE(client->await(sum, after(0.2), ignore));
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(60));
  store.close();
  EXPECT_THROW(client->await(sum, after(5), ignore), Aborted);
}

TEST(StoreClient, StoreThatReadsNothingIsGivenUp) {
  auto [client, store] = make_ends(0.2, 4096);
  const auto begin = Clock::now();
  client->set("key", Blob(1 << 20));
  client->leave();  // would continue the value
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(60));
  std::vector<std::byte> received(2 << 20);
  size_t bytes = 0;
  for (ssize_t got = 1; got > 0; bytes += size_t(std::max<ssize_t>(got, 0))) {
    got = recv(store.fd(), received.data(), received.size(), 0);
  }
  EXPECT_LT(bytes, size_t(1) << 20);
}

TEST(StoreClient, EventsArriveInOrderWithTheRepliesBeforeThem) {
  auto [client, store] = make_ends();
  const auto sum = client->add("n", 1);
  Blob events;
  append_event(events, {Change::set, "abort/1", Blob(3)});
  append_event(events, {Change::lost, "member/2", {}});
  write_to(store, stream_of({Kind::event, 0, 0, 0, uint32_t(events.size())},
                            std::string(text_of(events))));
  write_to(store, stream_of({Kind::reply, 0, 1, 0, 8}, std::string(8, '\0')));
  std::vector<std::string> keys;
  EXPECT_TRUE(
      client->await(sum, after(20), [&](const Event& event) { keys.push_back(event.key); }));
  EXPECT_EQ(keys, (std::vector<std::string>{"abort/1", "member/2"}));
}

}  // namespace
}  // namespace tandem::test
