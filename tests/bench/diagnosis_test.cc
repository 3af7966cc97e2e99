// Diagnosis of ranks and links: faults that a communicator of this test, or the diagnosis itself,
// makes are named, and nothing else is.
#include "bench/machine/diagnosis.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

namespace tandem {
namespace {

/// Rank whose puts to one peer are late, have a wrong bit, or never arrive.
class FaultyLink final : public Communicator {
 public:
  enum class Kind : uint8_t { late, wrong, cut };

  FaultyLink(Communicator& inner, int peer, Kind kind)
      : Communicator(inner.rank(), inner.size(), inner.deadline()),
        inner_(inner),
        peer_(peer),
        kind_(kind) {}

  std::string_view transport() const override { return inner_.transport(); }
  std::string link() const override { return inner_.link(); }
  std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) override {
    return inner_.allocate(bytes, signals);
  }
  void put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source, size_t bytes,
           int signal, uint64_t epoch) override {
    if (peer == peer_ && kind_ == Kind::cut) return;
    if (peer != peer_ || bytes == 0) {
      return inner_.put(peer, buffer, offset, source, bytes, signal, epoch);
    }
    if (kind_ == Kind::late) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    std::vector<std::byte> copy(static_cast<const std::byte*>(source),
                                static_cast<const std::byte*>(source) + bytes);
    if (kind_ == Kind::wrong) copy[bytes / 3] ^= std::byte{4};
    inner_.put(peer, buffer, offset, copy.data(), bytes, signal, epoch);
    inner_.flush();
  }
  void flush() override { inner_.flush(); }
  uint64_t read_signal(const SymmetricBuffer& buffer, int signal) const override {
    return inner_.read_signal(buffer, signal);
  }
  void wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
            const WaitSite& site) override {
    inner_.set_deadline(deadline());
    inner_.wait(buffer, signal, epoch, site);
  }
  void abort(const std::string& reason) override { inner_.abort(reason); }
  std::unique_ptr<Communicator> split(int color, int key) override {
    return inner_.split(color, key);
  }
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) override {
    inner_.set_deadline(deadline());
    return inner_.exchange(blob, what);
  }

 private:
  Communicator& inner_;
  const int peer_;
  const Kind kind_;
};

DiagnosisRequest small_request() {
  DiagnosisRequest request;
  request.machine = {.gemm_rows = 96, .memory_bytes = 1u << 20, .seconds = 0.01};
  request.links = {.message_bytes = 1u << 16, .messages = 3, .pings = 10, .seconds = 20};
  request.factor = 20;  // ranks share processors with other programs
  return request;
}

/// Diagnosis of four ranks, in which rank 1's link to rank 3 has a fault.
Diagnosis diagnose(const DiagnosisRequest& request, std::optional<FaultyLink::Kind> kind,
                   int ranks = 4) {
  Diagnosis result;
  run_threads({.ranks = ranks}, [&](Communicator& comm) {
    std::optional<FaultyLink> faulty;
    if (kind && comm.rank() == 1) faulty.emplace(comm, 3, *kind);
    Communicator& used = faulty ? static_cast<Communicator&>(*faulty) : comm;
    const Diagnosis diagnosis = diagnose_world(used, request, [](const std::string&) {});
    if (comm.rank() == 0) result = diagnosis;
  });
  return result;
}

/// Everything that is bad but for speed that other programs may take, a line each.
std::string wrong_bits(const Diagnosis& diagnosis) {
  std::string text;
  for (const DiagnosedRank& rank : diagnosis.ranks) {
    if (rank.problem.starts_with("slow")) continue;
    if (!rank.problem.empty()) text += fmt::format("{}: {}\n", rank.rank, rank.problem);
  }
  for (const auto& [link, problem] : diagnosis.links) {
    if (problem.empty() || problem.starts_with("slow")) continue;
    text += fmt::format("{}->{}: {}\n", link.from, link.to, problem.substr(0, problem.find(':')));
  }
  return text;
}

TEST(Diagnosis, FindsNothingWhereNothingIs) {
  for (const int ranks : {1, 2, 3, 5}) {
    const Diagnosis diagnosis = diagnose(small_request(), {}, ranks);
    EXPECT_EQ(wrong_bits(diagnosis), "") << ranks << " ranks";
    ASSERT_EQ(diagnosis.links.size(), size_t(ranks * (ranks - 1)));
    ASSERT_EQ(diagnosis.hosts.size(), 1u);
    for (const DiagnosedRank& rank : diagnosis.ranks) {
      EXPECT_GT(rank.machine.f32_gflops, 0);
      EXPECT_GT(rank.machine.bf16_gflops, 0);
      EXPECT_GT(rank.machine.copy_gbps, 0);
      EXPECT_GT(rank.loopback_gbps, 0);
      EXPECT_EQ(rank.ring_gbps > 0 && rank.all_to_all_gbps > 0, ranks > 1);
    }
    for (const DiagnosedLink& link : diagnosis.links) {
      EXPECT_GT(link.health.gbps, 0);
      EXPECT_GT(link.health.latency_us, 0);
    }
  }
}

TEST(Diagnosis, NamesTheRankThatComputesOrRemembersWrongBits) {
  DiagnosisRequest request = small_request();
  request.fault_rank = 2;
  request.fault = CheckFault::gemm;
  EXPECT_EQ(wrong_bits(diagnose(request, {})),
            "2: wrong bits: 1 of 9216 values of a f32 product\n");
  request.fault = CheckFault::memory;
  EXPECT_EQ(wrong_bits(diagnose(request, {})), "2: wrong bits: 1 of 1048576 bytes of memory\n");
  request.fault = CheckFault::message;
  EXPECT_EQ(wrong_bits(diagnose(request, {})), "2->3: wrong bits\n");
}

TEST(Diagnosis, NamesTheLinkThatChangesBitsOrIsCut) {
  EXPECT_EQ(wrong_bits(diagnose(small_request(), FaultyLink::Kind::wrong)), "1->3: wrong bits\n");
  DiagnosisRequest request = small_request();
  request.links.seconds = 0.5;
  const std::string found = wrong_bits(diagnose(request, FaultyLink::Kind::cut));
  EXPECT_NE(found.find("1->3: unreachable\n"), std::string::npos) << found;
}

TEST(Diagnosis, NamesTheSlowLink) {
  DiagnosisRequest request = small_request();
  request.factor = 8;
  const Diagnosis diagnosis = diagnose(request, FaultyLink::Kind::late);
  for (const auto& [link, problem] : diagnosis.links) {
    if (link.from != 1 || link.to != 3) continue;
    EXPECT_EQ(problem.substr(0, 6), "slow: ") << problem;
  }
}

TEST(Diagnosis, JudgesBySpeedsRelativeToTheMedianOfTheSameKind) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> near(0.9, 1.1);
  for (int round = 0; round < 200; ++round) {
    const int ranks = 3 + round % 6, slow_rank = round % ranks, bad_to = (slow_rank + 1) % ranks;
    Diagnosis diagnosis{
        .factor = 2, .network = "tcp", .hosts = {{"a", {}, ""}}, .ranks = {}, .links = {}};
    for (int rank = 0; rank < ranks; ++rank) {
      const double share = rank == slow_rank ? 2.5 : 1;
      diagnosis.hosts[0].ranks.push_back(rank);
      diagnosis.ranks.push_back(
          {.rank = rank,
           .host = 0,
           .machine = {100 * near(random), 200 * near(random) / share, 10 * near(random), ""},
           .loopback_gbps = 5 * near(random),
           .problem = ""});
      for (int from = 0; from < ranks; ++from) {
        if (from == rank) continue;
        const bool shared = (from + rank) % 2 == 0;  // of two kinds with very different speeds
        const bool slow = from == slow_rank && rank == bad_to;
        LinkHealth health{.from = from, .to = rank, .shared_memory = shared};
        health.gbps = (shared ? 50 : 1) * near(random) / (slow && round % 2 ? 3 : 1);
        health.latency_us = (shared ? 1 : 500) * near(random) * (slow && round % 2 == 0 ? 1000 : 1);
        diagnosis.links.push_back({health, ""});
      }
    }
    judge(diagnosis);
    for (const DiagnosedRank& rank : diagnosis.ranks) {
      ASSERT_EQ(rank.problem.find("bf16 GEMM") != rank.problem.npos, rank.rank == slow_rank)
          << rank.problem;
    }
    EXPECT_TRUE(diagnosis.hosts[0].problem.starts_with(fmt::format("rank {}: slow: ", slow_rank)));
    int of_kind[2] = {};
    for (const auto& [link, problem] : diagnosis.links) ++of_kind[link.shared_memory];
    for (const auto& [link, problem] : diagnosis.links) {
      const bool slow = link.from == slow_rank && link.to == bad_to;
      ASSERT_EQ(!problem.empty(), slow && of_kind[link.shared_memory] >= kMinForMedian)
          << round << ": " << link.from << "->" << link.to << ": " << problem;
    }
  }
}

TEST(Diagnosis, PatternsSetAndClearEachBitAndCountWrongBytes) {
  std::vector<uint64_t> words(3000), inverse(words.size());
  fill_pattern(words, 3);
  fill_pattern(inverse, ~uint64_t{3});
  for (size_t i = 0; i < words.size(); ++i) ASSERT_EQ(words[i], ~inverse[i]);
  EXPECT_EQ(count_wrong_bytes(words, 3), 0u);
  EXPECT_EQ(count_wrong_bytes(std::span(words).subspan(700), 3, 700), 0u);
  words[2999] ^= uint64_t{0x0100000000000081};
  words[1024] ^= uint64_t{1} << 20;
  EXPECT_EQ(count_wrong_bytes(words, 3), 3u);
  EXPECT_GT(count_wrong_bytes(words, 4), 20000u);
}

}  // namespace
}  // namespace tandem
