// Requests to the rendezvous store's state: keys, counters, leases, watches and meetings; and
// requests that no client of this library sends.
#include "comm/rendezvous/store_state.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "comm/rendezvous/store_client.h"

namespace tandem::test {
namespace {

using namespace control;

Message make_message(Kind kind, int rank, uint64_t value, std::string_view key,
                     std::span<const std::byte> blob) {
  Message message{{kind, rank, value, uint32_t(key.size()), uint32_t(blob.size())}, {}};
  for (const auto bytes : {bytes_of(key), blob}) {
    message.payload.insert(message.payload.end(), bytes.begin(), bytes.end());
  }
  return message;
}

/// A state, and what it has sent to each client.
struct Store {
  explicit Store(int size)
      : sent(size_t(size)), state(size, [this](int client, const Channel::Bytes& bytes) {
          Inbox inbox;
          inbox.append(*bytes);
          Message message;
          EXPECT_TRUE(inbox.take(message));
          sent.at(size_t(client)).push_back(std::move(message));
        }) {}

  bool set(int client, std::string_view key, std::string_view value, int lease_s = 0) {
    return state.handle(client, make_message(Kind::set, lease_s, 0, key, bytes_of(value)), now);
  }
  bool get(int client, std::string_view keys, bool wait) {
    return state.handle(client, make_message(Kind::get, wait ? 1 : 0, 7, keys, {}), now);
  }
  bool watch(int client, std::string_view family, bool settings) {
    return state.handle(client, make_message(Kind::watch, settings ? 1 : 0, 0, family, {}), now);
  }
  bool add(int client, std::string_view key, int64_t number) {
    return state.handle(
        client, make_message(Kind::add, 0, 7, key, std::as_bytes(std::span(&number, 1))), now);
  }
  bool meet(int client, std::string_view key, MeetHeader header, std::string_view text,
            std::string_view blob = {}) {
    header.compared_bytes = uint32_t(text.size());
    Blob all;
    for (const auto bytes :
         {std::as_bytes(std::span(&header, 1)), bytes_of(text), bytes_of(blob)}) {
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return state.handle(client, make_message(Kind::meet, 0, 1, key, all), now);
  }
  /// Values in the client's last reply.
  std::vector<std::string> values(int client) {
    std::vector<std::string> texts;
    for (const Blob& blob : split_blobs(sent.at(size_t(client)).back().payload)) {
      texts.emplace_back(text_of(blob));
    }
    return texts;
  }
  Met met(int client) {
    StoreClient::Reply reply;
    reply.message = sent.at(size_t(client)).back();
    EXPECT_EQ(reply.message.header.kind, Kind::met);
    return StoreClient::met(reply);
  }
  /// Events that the client has received since the last call, as "lost member/1".
  std::vector<std::string> events(int client) {
    constexpr const char* kNames[] = {"set", "left", "lost", "expired"};
    std::vector<std::string> texts;
    state.send_events();
    for (const Message& message : sent.at(size_t(client))) {
      if (message.header.kind != Kind::event) continue;
      for (const Event& event : split_events(message.payload)) {
        texts.push_back(std::string(kNames[size_t(event.change)]) + " " + event.key + " " +
                        std::string(text_of(event.value)));
      }
    }
    sent.at(size_t(client)).clear();
    return texts;
  }

  std::vector<std::vector<Message>> sent;
  Clock::time_point now = Clock::now();
  StoreState state;
};

using Texts = std::vector<std::string>;

TEST(StoreState, ReturnsWhatWasSet) {
  Store store(2);
  store.set(0, "a", "one");
  store.set(0, "b", "");
  store.get(1, "a\nb\nc", false);
  EXPECT_EQ(store.values(1), (Texts{"one", "", ""}));
  store.set(1, "a", "two");
  store.get(0, "a", true);
  EXPECT_EQ(store.values(0), (Texts{"two"}));
  EXPECT_EQ(store.sent[0].back().header.value, 7u);  // the request's number
}

TEST(StoreState, RepliesOnceAllKeysExist) {
  Store store(2);
  store.get(0, "a\nb\na", true);
  store.set(1, "a", "1");
  EXPECT_TRUE(store.sent[0].empty());
  store.set(1, "b", "2");
  EXPECT_EQ(store.values(0), (Texts{"1", "2", "1"}));
}

TEST(StoreState, CountersAddUp) {
  Store store(2);
  for (const int64_t number : {3, 0, -5}) EXPECT_TRUE(store.add(0, "n", number));
  int64_t sum = 0;
  std::memcpy(&sum, store.sent[0].back().payload.data(), sizeof sum);
  EXPECT_EQ(sum, -2);
  store.set(0, "text", "abc");
  EXPECT_FALSE(store.add(0, "text", 1));
}

TEST(StoreState, LeasesEndByTimeAndWithTheirClient) {
  Store store(4);
  store.watch(3, "member/", true);
  store.set(0, "member/0", "zero", 10);
  store.set(1, "member/1", "one", 10);
  store.set(2, "member/2", "two", 10);
  store.set(2, "other/2", "", 10);
  store.set(0, "member/all", "forever");
  EXPECT_EQ(store.events(3).size(), 4u);
  store.state.remove_client(1, true);
  store.state.remove_client(2, false);
  EXPECT_EQ(store.events(3), (Texts{"lost member/1 one", "left member/2 two"}));
  store.now += std::chrono::seconds(9);
  store.state.expire(store.now);
  store.set(0, "member/0", "again", 10);  // renews it
  store.now += std::chrono::seconds(9);
  store.state.expire(store.now);
  EXPECT_EQ(store.events(3), (Texts{"set member/0 again"}));
  store.now += std::chrono::seconds(2);
  store.state.expire(store.now);
  EXPECT_EQ(store.events(3), (Texts{"expired member/0 again"}));
  store.get(3, "member/0\nmember/1\nmember/all", false);
  EXPECT_EQ(store.values(3), (Texts{"", "", "forever"}));
}

TEST(StoreState, WatchersAreToldOfRemovalsOrOfEverything) {
  Store store(3);
  store.watch(0, "a/", false);
  store.watch(1, "a/", true);
  store.set(2, "a/1", "x", 5);
  store.set(2, "b/1", "x", 5);
  store.state.remove_client(2, true);
  store.state.send_events();
  EXPECT_EQ(store.sent[0].size(), 1u);  // one message for several events
  EXPECT_EQ(store.sent[1].size(), 1u);
  EXPECT_EQ(store.events(0), (Texts{"lost a/1 x"}));
  EXPECT_EQ(store.events(1), (Texts{"set a/1 x", "lost a/1 x"}));
}

TEST(StoreState, ALeaseTakenOverOutlivesItsFirstClient) {
  Store store(3);
  store.set(0, "leader", "0", 10);
  store.set(1, "leader", "1", 10);
  store.state.remove_client(0, true);
  store.get(2, "leader", false);
  EXPECT_EQ(store.values(2), (Texts{"1"}));
}

TEST(StoreState, MeetingsEndOnceAllHaveCome) {
  Store store(3);
  store.meet(2, "m", {3, 2, 0, 0}, "same", "c");
  store.meet(0, "m", {3, 0, 0, 0}, "same", "");
  EXPECT_TRUE(store.sent[0].empty());
  store.meet(1, "m", {3, 1, 0, 0}, "same", "bb");
  for (const int client : {0, 1, 2}) {
    const Met met = store.met(client);
    EXPECT_EQ(met.differs, -1);
    ASSERT_EQ(met.blobs.size(), 3u);
    EXPECT_EQ(text_of(met.blobs[1]), "bb");
    EXPECT_EQ(text_of(met.blobs[2]), "c");
  }
}

TEST(StoreState, BarriersSendNoBlobs) {
  Store store(2);
  store.meet(0, "m", {2, 0, 0, 0}, "barrier");
  store.meet(1, "m", {2, 1, 0, 0}, "barrier");
  EXPECT_TRUE(store.sent[0].back().payload.empty());
  EXPECT_EQ(store.sent[1].back().header.value, number_of_meeting("m"));
}

TEST(StoreState, TheFirstMemberThatDiffersIsNamed) {
  Store store(4);
  for (const int client : {3, 1, 0, 2}) {
    store.meet(client, "m", {4, uint32_t(client), 0, 0},
               client < 2    ? "a"
               : client == 2 ? "b"
                             : "c");
  }
  const Met met = store.met(1);
  EXPECT_EQ(met.differs, 2);
  EXPECT_EQ(met.first, "a");
  EXPECT_EQ(met.other, "b");
}

TEST(StoreState, ClientsThatAreGoneCountIfAskedFor) {
  Store store(4);
  store.state.remove_client(1, true);
  store.meet(0, "end", {4, 0, 0, 1}, "");
  store.meet(2, "end", {4, 2, 0, 1}, "");
  store.meet(2, "step", {4, 2, 0, 0}, "");
  EXPECT_TRUE(store.sent[0].empty());
  store.state.remove_client(3, false);
  EXPECT_EQ(store.met(0).differs, -1);
  EXPECT_EQ(store.sent[2].size(), 1u);  // the other meeting goes on
}

TEST(StoreState, MissingMembersAreListed) {
  Store store(3);
  store.meet(1, "m", {3, 1, 0, 0}, "");
  store.state.handle(1, make_message(Kind::overdue, 0, 9, "m", {}), store.now);
  StoreClient::Reply reply;
  reply.message = store.sent[1].back();
  EXPECT_EQ(StoreClient::missing(reply), (std::vector<int>{0, 2}));
}

TEST(StoreState, InvalidRequestsAreRefused) {
  Store store(2);
  EXPECT_FALSE(store.set(0, "a", "", -1));
  EXPECT_FALSE(
      store.state.handle(0, make_message(Kind::add, 0, 1, "n", bytes_of("three")), store.now));
  EXPECT_FALSE(
      store.state.handle(0, make_message(Kind::meet, 0, 1, "m", bytes_of("short")), store.now));
  EXPECT_FALSE(store.meet(0, "m", {~0u, 0, 0, 0}, ""));
  EXPECT_FALSE(store.meet(0, "m", {2, 2, 0, 0}, ""));
  EXPECT_FALSE(store.meet(0, "m", {3, 0, 0, 1}, ""));  // of all clients, which are two
  EXPECT_TRUE(store.meet(0, "m", {2, 0, 0, 0}, ""));
  EXPECT_FALSE(store.meet(0, "m", {2, 0, 0, 0}, ""));  // twice
  EXPECT_FALSE(store.meet(1, "m", {3, 1, 0, 0}, ""));  // another size
  MeetHeader long_text{2, 1, 100, 0};
  EXPECT_FALSE(store.state.handle(
      1, make_message(Kind::meet, 0, 1, "m", std::as_bytes(std::span(&long_text, 1))), store.now));
  for (const Kind kind : {Kind(0), Kind(3), Kind::reply, Kind::event, Kind::met}) {
    EXPECT_FALSE(store.state.handle(0, make_message(kind, 0, 0, "", {}), store.now));
  }
}

// Whatever the bytes of a request, the state answers it or refuses it.
TEST(StoreState, RandomRequestsAreHarmless) {
  std::mt19937 random(7);
  Store store(8);
  int valid = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto number = [&](uint32_t below) { return uint32_t(random()) % below; };
    std::string key(number(3), 'a'), blob(number(40), '\0');
    for (char& c : blob) c = char(number(4) ? number(6) : number(256));
    const int client = int(number(8));
    const Kind kind = Kind(uint32_t(Kind::set) + number(5));
    valid += store.state.handle(
        client, make_message(kind, int(number(5)) - 1, number(3), key, bytes_of(blob)), store.now);
    if (i % 100 == 0) store.state.remove_client(client, number(2) == 0);
    if (i % 50 == 0) store.state.send_events();
    for (auto& messages : store.sent) messages.clear();
  }
  EXPECT_GT(valid, 1000);
  EXPECT_TRUE(store.set(0, "still", "there"));
}

}  // namespace
}  // namespace tandem::test
