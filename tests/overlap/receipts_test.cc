// Receipts of operators with planted candidates: what was asked, what ran, and why; and strict
// operators, which refuse what is not as asked. Each candidate notes that it ran.
#include <gmock/gmock.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/system/env.h"
#include "gemm/gemm.h"
#include "overlap/ag_gemm/operator.h"
#include "overlap/contract/receipt.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr std::chrono::milliseconds kSlow{4};

/// Candidates of a case: which there are, and which is slow.
struct Planted {
  bool overlaps = true, slow_serial = false;
};
constexpr Planted kNothingOverlaps{.overlaps = false}, kSerialIsFaster{},
    kOverlappedIsFaster{.slow_serial = true};

thread_local std::vector<Strategy> forms_that_ran;

/// AgGemm in name and shape, whose candidates compute nothing.
template <const Planted& planted>
class PlantedCpu {
 public:
  PlantedCpu(Communicator&, const OpDesc&) {}
  std::vector<Candidate> candidates(const std::vector<int>& counts) {
    return chunked_candidates(planted.overlaps ? counts : std::vector<int>{},
                              [](Strategy form, int, const Operands&) {
                                forms_that_ran.push_back(form);
                                const bool slow = (form == Strategy::serial) == planted.slow_serial;
                                if (slow) std::this_thread::sleep_for(kSlow);
                              });
  }
};

/// `m` distinguishes cases in the tuner's file.
template <const Planted& planted>
std::unique_ptr<OverlapOperator> make(Communicator& comm, int64_t m,
                                      const OverlapOptions& options) {
  OperatorRow row = kAgGemmRow;
  row.on_cpu = make_on_cpu<PlantedCpu<planted>>;
  const OpDesc desc = row.describe(comm, {.m = m, .n = 6, .k = 4, .dtype = DType::f32});
  return make_operator(row, comm, desc, options, Choosing::fastest);
}

/// Whether a receipt says what a call ran: the control is a receipt that does not.
bool is_true(const Receipt& receipt, Strategy ran) {
  const Strategy expected = receipt.group == 1 ? Strategy::serial : ran;
  return receipt.ran == expected && receipt.why.empty() == (receipt.asked == Strategy::serial ||
                                                            expected == Strategy::overlapped);
}

/// Receipt of an operator that was called once.
template <const Planted& planted>
Receipt receipt_of_call(Communicator& comm, int64_t m, Strategy asked) {
  const auto op = make<planted>(comm, m, {asked, 1});
  const OpDesc& d = op->desc();
  const Memory x(size_t(d.x.rows * d.k) * 4), weight(size_t(d.n * d.k) * 4),
      out(size_t(m * d.n) * 4);
  forms_that_ran.clear();
  op->run({x.view(DType::f32, {d.x.rows, d.k}), weight.view(DType::f32, {d.n, d.k}),
           out.view(DType::f32, {m, d.n})});
  EXPECT_EQ(forms_that_ran.size(), 1u);
  const Receipt receipt = op->receipt();
  EXPECT_TRUE(is_true(receipt, forms_that_ran.at(0))) << to_json(receipt);
  Receipt wrong = receipt;
  wrong.ran = wrong.ran == Strategy::serial ? Strategy::overlapped : Strategy::serial;
  EXPECT_FALSE(is_true(wrong, forms_that_ran.at(0)));
  EXPECT_EQ(receipt.calls, 1);
  EXPECT_EQ(receipt.group, comm.size());
  EXPECT_EQ(receipt.asked, asked);
  return receipt;
}

class Receipts : public OnRanks {};

TEST_P(Receipts, SayWhyNothingOverlaps) {
  run([](Communicator& comm) {
    for (const Strategy asked : {Strategy::automatic, Strategy::overlapped}) {
      const Receipt r = receipt_of_call<kNothingOverlaps>(comm, 8, asked);
      EXPECT_EQ(r.why, comm.size() == 1 ? "a group of 1 rank has nothing to overlap"
                                        : "no candidate overlaps");
      EXPECT_EQ(r.candidate, "serial, 1 chunk");
    }
    const Receipt serial = receipt_of_call<kNothingOverlaps>(comm, 8, Strategy::serial);
    EXPECT_EQ(serial.why, "");
  });
}

TEST_P(Receipts, SayThatSerialIsFaster) {
  run([](Communicator& comm) {
    const Receipt r = receipt_of_call<kSerialIsFaster>(comm, 9, Strategy::automatic);
    EXPECT_EQ(r.ran, Strategy::serial);
    if (comm.size() == 1) return;
    EXPECT_TRUE(r.speedup == 1 || !env().tune);
    EXPECT_THAT(r.why, HasSubstr(r.speedup > 0 ? "no overlapped candidate is 2 % faster: "
                                               : "TANDEM_TUNE=0"));
    const Receipt forced = receipt_of_call<kSerialIsFaster>(comm, 9, Strategy::overlapped);
    EXPECT_EQ(forced.ran, Strategy::overlapped);
    EXPECT_EQ(forced.candidate, "overlapped, 1 chunk");
  });
}

TEST_P(Receipts, SayByHowMuchOverlappedIsFaster) {
  if (!env().tune) GTEST_SKIP() << "TANDEM_TUNE=0 compares nothing";
  run([](Communicator& comm) {
    const Receipt r = receipt_of_call<kOverlappedIsFaster>(comm, 10, Strategy::automatic);
    if (comm.size() == 1) return;
    EXPECT_EQ(r.ran, Strategy::overlapped);
    EXPECT_GT(r.speedup, 1);
  });
}

TEST_P(Receipts, StrictOperatorsThatWouldNotOverlapAreRefusedOnAllRanks) {
  run([](Communicator& comm) {
    for (const Strategy asked : {Strategy::automatic, Strategy::overlapped}) {
      forms_that_ran.clear();
      const std::string text = error_of<Unsupported>([&] {
        make<kNothingOverlaps>(comm, 8, {.strategy = asked, .chunks = 1, .strict = true});
      });
      EXPECT_THAT(text, StartsWith("ag_gemm: m 8 n 6 k 4 f32, " + std::to_string(comm.size())));
      EXPECT_THAT(text, HasSubstr(std::string(name_of(asked)) + " would run as serial: "));
      EXPECT_THAT(text, testing::EndsWith(": expected overlapped, as strict requests"));
      EXPECT_EQ(text.find('\n'), std::string::npos);
      EXPECT_TRUE(forms_that_ran.empty());
    }
    EXPECT_NE(error_of<Unsupported>([&] { make<kSerialIsFaster>(comm, 9, {.strict = true}); }), "");
    // Asked for, serial is no refusal; and the ranks are still in step.
    make<kNothingOverlaps>(comm, 8, {.strategy = Strategy::serial, .strict = true});
    if (comm.size() == 1) return;
    make<kSerialIsFaster>(comm, 9, {.strategy = Strategy::overlapped, .strict = true});
    if (env().tune) make<kOverlappedIsFaster>(comm, 10, {.chunks = 1, .strict = true});
  });
}

TEST_P(Receipts, EveryOperatorIsStrict) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const auto refused = [&](const auto& construct) {
      const bool throws = !error_of<Unsupported>(construct).empty();
      EXPECT_EQ(throws, comm.size() == 1);
    };
    const OverlapOptions strict{.strategy = Strategy::overlapped, .strict = true};
    refused([&] { AgGemm(comm, {.m = 8, .n = 6, .k = 4}, strict); });
    refused([&] { GemmRs(comm, {.m = 8, .n = 6, .k = 4}, strict); });
    refused([&] { GemmAr(comm, {.m = 8, .n = 6, .k = 4}, strict); });
    refused([&] { AgWgrad(comm, {.m = 8, .n = 6, .k = 4}, strict); });
  });
}

TEST_P(Receipts, RanksMustAgreeOnStrict) {
  if (ranks() == 1) GTEST_SKIP() << "one rank has none to differ from";
  run([](Communicator& comm) {
    EXPECT_THROW(AgGemm(comm, {.m = 8, .n = 6, .k = 4},
                        {.strategy = Strategy::overlapped, .strict = comm.rank() == 0}),
                 Mismatch);
  });
}

TEST(RecordChoice, NamesRefusedCandidatesAndCountsTheFastestSerialOne) {
  const std::vector<NamedForm> forms{{"serial_nccl", Strategy::serial},
                                     {"serial_kernels", Strategy::serial},
                                     {"fused", Strategy::overlapped}};
  Receipt fast{.group = 2};
  record_choice(fast, forms, std::vector<double>{30, 20, 10}, 2, {});
  EXPECT_EQ(fast.ran, Strategy::overlapped);
  EXPECT_EQ(fast.candidate, "fused");
  EXPECT_EQ(fast.speedup, 2);
  EXPECT_EQ(fast.why, "");
  Receipt slow{.op = "ag_gemm", .shape = "m 8", .group = 2};
  record_choice(slow, forms, std::vector<double>{30, 20, 21}, 1, {});
  EXPECT_EQ(
      describe(slow, "ran"),
      "ag_gemm: m 8, 2 ranks: automatic ran as serial: no overlapped candidate is 2 % faster: "
      "21.0 us, serial 20.0 us");
  Receipt refused{.group = 2, .asked = Strategy::overlapped};
  record_choice(refused, std::span(forms).first(2), std::vector<double>{30, 20}, 1,
                "fused as e4m3: expected int8, int4");
  EXPECT_EQ(refused.why, "no candidate overlaps: fused as e4m3: expected int8, int4");
  EXPECT_EQ(to_json(refused)["ran"], "serial");
}

TANDEM_INSTANTIATE(Receipts);

}  // namespace
}  // namespace tandem::test
