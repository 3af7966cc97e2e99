// Put-with-signal, waits, exchange and split, on every transport.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tandem/random.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;

class CommunicatorTest : public OnRanks {};
TANDEM_INSTANTIATE(CommunicatorTest);

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_P(CommunicatorTest, KnowsItsRankSizeAndTransport) {
  std::atomic<int> seen{0};
  run([&](Communicator& comm) {
    EXPECT_EQ(comm.size(), ranks());
    EXPECT_GE(comm.rank(), 0);
    EXPECT_LT(comm.rank(), ranks());
    EXPECT_EQ(comm.transport(), expected_transport(comm.size()));
    EXPECT_FALSE(comm.link().empty());
    seen |= 1 << comm.rank();
  });
  if (!mpi_world()) {
    EXPECT_EQ(seen, (1 << ranks()) - 1);
  }
}

TEST_P(CommunicatorTest, BuffersAreZeroInitialized) {
  run([&](Communicator& comm) {
    const auto buffer = comm.allocate(1000, 5);
    EXPECT_EQ(buffer->bytes(), 1000u);
    EXPECT_EQ(buffer->signals(), 5);
    EXPECT_EQ(bytes_of(*buffer, 0, 1000), std::vector<std::byte>(1000));
    for (int s = 0; s < 5; ++s) EXPECT_EQ(comm.read_signal(*buffer, s), 0u);
    EXPECT_EQ(buffer->peer(comm.rank()), buffer->local());
    comm.barrier();
  });
}

// Every rank puts a block to every rank, itself included; the bytes have arrived when the signal is
// seen.
TEST_P(CommunicatorTest, PayloadIsVisibleBeforeItsSignal) {
  run([&](Communicator& comm) {
    constexpr size_t kWords = 3001;
    const auto buffer = comm.allocate(kWords * 8 * size_t(comm.size()), comm.size());
    std::vector<uint64_t> source(kWords);
    for (uint64_t epoch = 1; epoch <= 20; ++epoch) {
      for (size_t i = 0; i < kWords; ++i) source[i] = epoch * 1000003 + uint64_t(comm.rank()) + i;
      for (int peer = 0; peer < comm.size(); ++peer) {
        comm.put(peer, *buffer, kWords * 8 * size_t(comm.rank()), source.data(), kWords * 8,
                 comm.rank(), epoch);
      }
      for (int r = 0; r < comm.size(); ++r) {
        comm.wait(*buffer, r, epoch, {"test", r});
        const auto block = words_of(*buffer, kWords * size_t(r), kWords);
        for (size_t i = 0; i < kWords; ++i) {
          ASSERT_EQ(block[i], epoch * 1000003 + uint64_t(r) + i) << epoch;
        }
      }
      comm.flush();
      comm.barrier();
    }
  });
}

// Puts of different sizes with different signals: when the last has arrived, so have all earlier
// ones.
TEST_P(CommunicatorTest, PutsArriveInOrder) {
  run([&](Communicator& comm) {
    constexpr int kPuts = 24;
    constexpr size_t kSlot = 40000;
    const auto buffer = comm.allocate(kSlot * kPuts, kPuts);
    std::vector<std::byte> source(kSlot, std::byte(comm.rank() + 1));
    const int peer = (comm.rank() + 1) % comm.size();
    const int from = (comm.rank() + comm.size() - 1) % comm.size();
    const auto size_of_put = [](int i) { return i % 5 == 4 ? size_t(0) : kSlot >> (i % 7); };
    for (uint64_t epoch = 1; epoch <= 10; ++epoch) {
      for (int i = 0; i < kPuts; ++i) {
        comm.put(peer, *buffer, kSlot * size_t(i), source.data(), size_of_put(i), i, epoch);
      }
      comm.wait(*buffer, kPuts - 1, epoch, {"test", from});
      for (int i = 0; i < kPuts; ++i) {
        EXPECT_EQ(comm.read_signal(*buffer, i), epoch);
        const size_t bytes = size_of_put(i);
        if (bytes == 0) continue;
        EXPECT_EQ(bytes_of(*buffer, kSlot * size_t(i) + bytes - 1, 1)[0], std::byte(from + 1));
      }
      comm.flush();
      comm.barrier();
      clear(*buffer);
      comm.barrier();
    }
  });
}

// A ring through two slots, thousands of times, synchronized only by epochs and acknowledgements.
TEST_P(CommunicatorTest, EpochsWrapASmallBuffer) {
  run([&](Communicator& comm) {
    constexpr size_t kSlots = 2, kWords = 17;
    constexpr uint64_t kRounds = 5000;
    enum { arrived, freed, signals };
    const auto buffer = comm.allocate(kSlots * kWords * 8, signals);
    const int next = (comm.rank() + 1) % comm.size();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    const auto value_of = [](int rank, uint64_t round, size_t i) {
      return uint64_t(rank) << 32 | (round * 100 + i);
    };
    std::vector<uint64_t> source(kSlots * kWords);
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (round > kSlots) comm.wait(*buffer, freed, round - kSlots, {"ring", next});
      const size_t slot = round % kSlots * kWords;
      for (size_t i = 0; i < kWords; ++i) source[slot + i] = value_of(comm.rank(), round, i);
      comm.put(next, *buffer, slot * 8, &source[slot], kWords * 8, arrived, round);
      comm.wait(*buffer, arrived, round, {"ring", previous});
      const auto got = words_of(*buffer, slot, kWords);
      for (size_t i = 0; i < kWords; ++i) ASSERT_EQ(got[i], value_of(previous, round, i));
      comm.put(previous, *buffer, 0, nullptr, 0, freed, round);
    }
    comm.flush();
    comm.barrier();
  });
}

TEST_P(CommunicatorTest, ZeroLengthPutOnlyRaisesTheSignal) {
  run([&](Communicator& comm) {
    const auto empty = comm.allocate(0, 1);
    comm.put((comm.rank() + 1) % comm.size(), *empty, 0, nullptr, 0, 0, 7);
    comm.wait(*empty, 0, 7, {"test"});
    EXPECT_EQ(comm.read_signal(*empty, 0), 7u);
    comm.wait(*empty, 0, 3, {"test"});
    comm.barrier();
  });
}

TEST_P(CommunicatorTest, ArgumentsOutOfRangeAreNamed) {
  run([&](Communicator& comm) {
    const auto buffer = comm.allocate(64, 2);
    const uint64_t source = 0;
    const auto put = [&](int peer, size_t offset, size_t bytes, int signal) {
      return message_of([&] { comm.put(peer, *buffer, offset, &source, bytes, signal, 1); });
    };
    EXPECT_THAT(put(comm.size(), 0, 8, 0), HasSubstr("peer " + std::to_string(comm.size())));
    EXPECT_THAT(put(-1, 0, 8, 0), HasSubstr("peer -1"));
    EXPECT_THAT(put(0, 60, 8, 0), HasSubstr("[60, 60 + 8)"));
    EXPECT_THAT(put(0, SIZE_MAX, 8, 0), HasSubstr("64 bytes"));
    EXPECT_THAT(put(0, 0, 8, 2), HasSubstr("signal 2"));
    EXPECT_THAT(put(0, 0, 8, -1), HasSubstr("signal -1"));
    EXPECT_THAT(message_of([&] { comm.wait(*buffer, 9, 1, {}); }), HasSubstr("signal 9"));
    EXPECT_THAT(message_of([&] { comm.read_signal(*buffer, 2); }), HasSubstr("expected 0 to 1"));
    EXPECT_THAT(message_of([&] { comm.allocate(8, -1); }), HasSubstr("-1 signals"));
    for (const size_t bytes : {SIZE_MAX, SIZE_MAX - 4096, (size_t(1) << 48) + 1}) {
      EXPECT_THAT(message_of([&] { comm.allocate(bytes, 1); }),
                  HasSubstr("allocate: " + std::to_string(bytes) + " bytes: expected at most"));
    }
    comm.barrier();
  });
}

TEST_P(CommunicatorTest, ExchangeKeepsEveryBlob) {
  run([&](Communicator& comm) {
    for (const size_t scale : {size_t(0), size_t(1), size_t(700), size_t(5000)}) {
      std::vector<std::byte> local_data(scale * size_t(comm.rank() + 1),
                                        std::byte(comm.rank() + 65));
      const auto all = comm.exchange(local_data, "blobs");
      ASSERT_EQ(all.size(), size_t(comm.size()));
      for (size_t r = 0; r < all.size(); ++r) {
        EXPECT_EQ(all[r], std::vector<std::byte>(scale * (r + 1), std::byte(r + 65)));
      }
    }
  });
}

// Every rank learns of a disagreement, and the communicator stays usable.
TEST_P(CommunicatorTest, DisagreementIsThrownOnEveryRank) {
  if (ranks() == 1) GTEST_SKIP() << "needs two ranks";
  run([&](Communicator& comm) {
    const bool odd = comm.rank() == comm.size() - 1;
    const auto last = std::to_string(comm.size() - 1);
    EXPECT_THAT(message_of([&] { comm.allocate(odd ? 16 : 8, 1); }),
                HasSubstr("allocate: rank 0 has 8 bytes, 1 signals, rank " + last + " has 16"));
    EXPECT_THROW(comm.allocate(8, odd ? 2 : 1), Mismatch);
    EXPECT_THROW(comm.require_same("layers", odd ? "4" : "3"), Mismatch);
    EXPECT_THAT(message_of([&] { odd ? comm.barrier("save") : comm.barrier("load"); }),
                HasSubstr("rank 0 is in load, rank " + last + " in save"));
    EXPECT_NO_THROW(comm.require_same("layers", "3"));
    EXPECT_EQ(comm.allocate(8, 1)->bytes(), 8u);
  });
}

// Dropping a buffer waits for no other rank, and puts to a rank that has dropped its buffer are
// harmless: they raise no error and do not touch later allocations.
TEST_P(CommunicatorTest, RanksDropBuffersInAnyOrder) {
  run([](Communicator& comm) {
    constexpr size_t kBuffers = 5, kBytes = 5000;
    const std::vector<std::byte> source(kBytes, std::byte{7});
    std::shared_ptr<SymmetricBuffer> last_buffer;
    for (size_t round = 0; round < 4; ++round) {
      std::vector<std::shared_ptr<SymmetricBuffer>> buffers;
      for (size_t i = 0; i < kBuffers; ++i) {
        buffers.push_back(comm.allocate(kBytes * size_t(comm.size()), comm.size()));
      }
      const auto fresh = words_of(*buffers[0], 0, kBytes / 8);
      EXPECT_EQ(fresh, std::vector<uint64_t>(kBytes / 8)) << "round " << round;
      comm.barrier("looked");
      for (size_t step = 0; step < kBuffers; ++step) {
        const size_t turned = (step + size_t(comm.rank()) + round) % kBuffers;
        const size_t next = comm.rank() % 2 == 0 ? turned : kBuffers - 1 - turned;
        for (int peer = 0; peer < comm.size(); ++peer) {
          comm.put(peer, *buffers[next], kBytes * size_t(comm.rank()), source.data(), kBytes,
                   comm.rank(), 1);
        }
        comm.flush();
        // The last rank keeps one buffer a round longer than all others.
        if (next == 2 && comm.rank() + 1 == comm.size()) last_buffer = buffers[next];
        buffers[next].reset();
      }
    }
  });
}

// Limits the address space to its current size and a little more.
class LittleMemory {
 public:
  LittleMemory() {
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    getrlimit(RLIMIT_AS, &before_);
    rlimit little = before_;
    little.rlim_cur = pages * size_t(sysconf(_SC_PAGESIZE)) + (size_t(64) << 20);
    setrlimit(RLIMIT_AS, &little);
  }
  ~LittleMemory() { setrlimit(RLIMIT_AS, &before_); }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

 private:
  rlimit before_{};
};

TEST_P(CommunicatorTest, OutOfMemoryOnOneRankIsThrownOnAll) {
  if (!mpi_world()) GTEST_SKIP() << "ranks of one process have the same memory";
  run([](Communicator& comm) {
    const bool last = comm.rank() + 1 == comm.size();
    std::string message;
    {
      const auto little = last ? std::make_unique<LittleMemory>() : nullptr;
      try {
        comm.allocate(size_t(1) << 30, 1);
      } catch (const IoError& error) {
        message = error.what();
      }
    }
    EXPECT_THAT(message, HasSubstr("rank " + std::to_string(comm.size() - 1) + ": shared memory"));
    EXPECT_EQ(comm.allocate(8, 1)->bytes(), 8u);
  });
}

TEST_P(CommunicatorTest, SplitGroupsByColorAndOrdersByKey) {
  run([&](Communicator& comm) {
    const auto half = comm.split(comm.rank() % 2, -comm.rank());
    EXPECT_EQ(half->size(), (comm.size() + 1 - comm.rank() % 2) / 2);
    EXPECT_EQ(half->transport(), comm.transport());
    const int local_data = comm.rank();
    const auto all = half->exchange(std::as_bytes(std::span(&local_data, 1)), "ranks");
    int last = comm.size();
    for (const auto& blob : all) {
      int remote;
      std::memcpy(&remote, blob.data(), sizeof remote);
      EXPECT_EQ(remote % 2, comm.rank() % 2);
      EXPECT_LT(remote, last);
      last = remote;
    }
    // Groups of groups, used in turn with their parents.
    const auto alone = half->split(half->rank(), 0);
    EXPECT_EQ(alone->size(), 1);
    const auto same = half->split(0, half->rank());
    for (int i = 0; i < 50; ++i) {
      same->barrier();
      alone->barrier();
      half->barrier();
      comm.barrier();
    }
    const auto buffer = same->allocate(8, 1);
    const uint64_t value = uint64_t(1000 * (comm.rank() % 2) + same->rank());
    same->put((same->rank() + 1) % same->size(), *buffer, 0, &value, 8, 0, 1);
    same->wait(*buffer, 0, 1, {"test"});
    EXPECT_EQ(
        words_of(*buffer, 0, 1)[0],
        uint64_t(1000 * (comm.rank() % 2) + (same->rank() + same->size() - 1) % same->size()));
    same->flush();
    comm.barrier();
  });
}

// Ranks that arrive at different times neither lose nor reorder signals.
TEST_P(CommunicatorTest, RandomDelaysLoseNoSignals) {
  run([&](Communicator& comm) {
    const auto buffer = comm.allocate(size_t(comm.size()) * 8, comm.size());
    for (uint64_t epoch = 1; epoch <= 40; ++epoch) {
      const float delay = uniform(1, uint64_t(comm.rank()), epoch);
      if (delay < 0.3f) std::this_thread::sleep_for(std::chrono::microseconds(int(delay * 3000)));
      const uint64_t value = epoch * 10 + uint64_t(comm.rank());
      for (int peer = 0; peer < comm.size(); ++peer) {
        comm.put(peer, *buffer, size_t(comm.rank()) * 8, &value, 8, comm.rank(), epoch);
      }
      for (int r = 0; r < comm.size(); ++r) {
        comm.wait(*buffer, r, epoch, {"test", r});
        EXPECT_EQ(words_of(*buffer, size_t(r), 1)[0], epoch * 10 + uint64_t(r));
      }
      comm.flush();
      comm.barrier();
    }
  });
}

}  // namespace
}  // namespace tandem::test
