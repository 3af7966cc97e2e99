// Text that one process of a host reads for the others: in this process, forked, and under mpirun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <optional>
#include <thread>

#include "core/system/files.h"
#include "engine/data/corpus.h"
#include "engine/data/ledger/ledger_lines.h"
#include "engine/data/loader.h"
#include "engine/data/text/host_text.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using ::testing::HasSubstr;
constexpr int64_t kSeq = 16;
constexpr MailboxShape kShape{3, 4, kSeq, true};

/// Text that its numbers tell.
void fill_text(int64_t begin, int64_t count, const TextView& text) {
  ASSERT_EQ(text.tokens.size(), size_t(count * kSeq));
  for (size_t i = 0; i < text.tokens.size(); ++i) {
    text.tokens[i] = int32_t(begin) * 1000 + int32_t(i);
    text.targets[i] = text.tokens[i] + 1;
    text.document_starts[i] = int32_t(i % 5);
  }
  *text.hash = uint64_t(begin * 77 + count);
}

struct Text {
  explicit Text(int64_t count)
      : tokens(size_t(count * kSeq)), targets(tokens.size()), starts(tokens.size()) {}
  TextView view() { return {tokens, targets, starts, &hash}; }
  std::vector<int32_t> tokens, targets, starts;
  uint64_t hash = 0;
  bool operator==(const Text&) const = default;
};

void expect_read(TextClient& client, int64_t begin, int64_t count) {
  Text found(count), expected(count);
  client.read(begin, count, found.view());
  fill_text(begin, count, expected.view());
  EXPECT_EQ(found, expected) << begin;
}

std::string error_of(TextClient& client, int64_t begin, int64_t count = 1) {
  Text text(count);
  try {
    client.read(begin, count, text.view());
  } catch (const IoError& error) {
    return error.what();
  }
  return "read";
}

class HostText : public ::testing::Test {
 protected:
  void SetUp() override {
    if (mpi_world) GTEST_SKIP() << "needs no ranks";
  }
};

TEST_F(HostText, EachClientGetsWhatItAskedFor) {
  TextServer server(kShape, fill_text);
  std::vector<std::thread> threads;
  for (int mailbox = 0; mailbox < 3; ++mailbox) {
    threads.emplace_back([&, mailbox] {
      TextClient client(kShape, mailbox, server.handle(), 60);
      for (int64_t i = 0; i < 200; ++i) expect_read(client, 1000 * mailbox + i, 1 + i % 4);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(HostText, ErrorsOfTheServerAreThrownAndDoNotLast) {
  TextServer server(kShape, [](int64_t begin, int64_t count, const TextView& text) {
    if (begin == 7) throw IoError("shard.bin: gone");
    fill_text(begin, count, text);
  });
  TextClient client(kShape, 0, server.handle(), 60);
  EXPECT_EQ(error_of(client, 7), "shard.bin: gone");
  expect_read(client, 8, 2);
  EXPECT_THAT(error_of(client, 9, 5), HasSubstr("a request of 5 samples: expected 1 to 4"));
}

TEST_F(HostText, ServerThatStopsEndsReads) {
  std::atomic<bool> asked = false;
  std::optional<TextServer> server;
  server.emplace(kShape, [&](int64_t begin, int64_t count, const TextView& text) {
    asked = true;
    std::this_thread::sleep_for(milliseconds(50));
    fill_text(begin, count, text);
  });
  TextClient first(kShape, 0, server->handle(), 60), second(kShape, 1, server->handle(), 60);
  std::thread reader([&] { EXPECT_EQ(error_of(first, 1), "read"); });
  while (!asked) std::this_thread::yield();
  server.reset();
  reader.join();
  EXPECT_THAT(error_of(second, 1), HasSubstr("has stopped reading"));
}

TEST_F(HostText, LateServerIsReportedAtTheDeadline) {
  std::atomic<bool> release = false;
  TextServer server(kShape, [&](int64_t, int64_t, const TextView&) {
    while (!release) std::this_thread::sleep_for(milliseconds(1));
  });
  TextClient client(kShape, 0, server.handle(), 0.2);
  EXPECT_THAT(error_of(client, 5), HasSubstr("has not sent samples 5 to 5 for 0.2 s"));
  EXPECT_THAT(error_of(client, 6), HasSubstr("an earlier request"));
  release = true;
}

TEST_F(HostText, StopEndsARead) {
  std::atomic<bool> asked = false, release = false;
  TextServer server(kShape, [&](int64_t, int64_t, const TextView&) {
    asked = true;
    while (!release) std::this_thread::sleep_for(milliseconds(1));
  });
  TextClient client(kShape, 0, server.handle(), 60);
  const auto begin = Clock::now();
  std::thread reader([&] { EXPECT_NE(error_of(client, 5), "read"); });
  while (!asked) std::this_thread::yield();
  client.stop();
  reader.join();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30));
  release = true;
}

TEST_F(HostText, KilledServerEndsReads) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const TextServer server(kShape, [](int64_t begin, int64_t count, const TextView& text) {
      if (begin == 9) ::kill(::getpid(), SIGKILL);
      fill_text(begin, count, text);
    });
    const auto handle = server.handle();
    if (::write(pipe[1], &handle, sizeof handle) != ssize_t(sizeof handle)) ::_exit(1);
    while (true) ::pause();
  }
  processes::SharedMemory::Handle handle;
  ASSERT_EQ(::read(pipe[0], &handle, sizeof handle), ssize_t(sizeof handle));
  TextClient client(kShape, 2, handle, 60);
  expect_read(client, 8, 3);
  const auto begin = Clock::now();
  EXPECT_THAT(error_of(client, 9), HasSubstr("the process that reads the text has ended"));
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30));
  ::waitpid(child, nullptr, 0);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

/// Sums over the ranks.
int64_t sum_of(Communicator& world, int64_t value) {
  int64_t sum = 0;
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&value, 1)), "sum")) {
    int64_t each = 0;
    std::memcpy(&each, blob.data(), sizeof each);
    sum += each;
  }
  return sum;
}

// Half of the ranks ask for the same samples, as tensor-parallel ranks do.
TEST(HostLoader, ProcessesReadEachTextOnce) {
  if (!mpi_world) GTEST_SKIP() << "needs processes";
  Communicator& world = *mpi_world;
  const TempDir dir;
  std::string text(5000, ' ');
  for (size_t i = 0; i < text.size(); ++i) text[i] = char(philox(8, 0, i)[0]);
  write_bytes(dir / "text", text);
  const Corpus corpus(std::vector<std::string>{dir / "text"}, 0);
  std::atomic<int64_t> read = 0;
  const auto count = [&](int64_t sample) {
    ++read;
    return sample;
  };
  const Sampler counted(corpus, kSeq, 3, {.order = count}), sampler(corpus, kSeq, 3);
  const int64_t replicas = world.size() / 2, replica = world.rank() / 2;
  constexpr int64_t kSteps = 20, kCount = 2;
  const auto loader = share_loader(world, corpus, counted, {kSeq, kCount, replicas});
  const auto request = [&](int64_t step) {
    return loader->request((step * replicas + replica) * kCount, kCount);
  };
  auto next = request(0);
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto block = std::exchange(next, request(step + 1));
    block->await();
    uint64_t hash = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      const int64_t sample = (step * replicas + replica) * kCount + i;
      std::vector<int32_t> tokens(kSeq), targets(kSeq);
      sampler.read(sample, tokens, targets);
      EXPECT_TRUE(std::ranges::equal(tokens, block->tokens().subspan(size_t(i * kSeq), kSeq)));
      EXPECT_TRUE(std::ranges::equal(targets, block->targets().subspan(size_t(i * kSeq), kSeq)));
      hash += sample_hash(sample, tokens, targets);
    }
    EXPECT_EQ(block->hash(), hash);
    world.barrier();
  }
  next->await();
  world.barrier();
  const int64_t of_rank = read;
  EXPECT_EQ(of_rank, world.rank() > 0 ? 0 : (kSteps + 1) * replicas * kCount);
  EXPECT_EQ(sum_of(world, of_rank), (kSteps + 1) * replicas * kCount);
}

}  // namespace
}  // namespace tandem
