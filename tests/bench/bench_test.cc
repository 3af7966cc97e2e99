// `tandem bench` reports only what it has checked: every operator and collective matches its
// reference on odd sizes, and the reported figures are consistent.
#include "bench/bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "bench/bench_case.h"
#include "bench/bench_paged.h"
#include "bench/bench_rates.h"
#include "bench/bench_receipt.h"
#include "bench/engine/bench_prefill.h"
#include "bench/output/bench_output.h"
#include "gemm/gemm.h"

namespace tandem {
namespace {

BenchTimes taking(double us) {
  BenchTimes times;
  times.median_us = us;
  return times;
}

TEST(Bench, PagedAttentionMatchesItsReference) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t window : {0, 40}) {
      for (const int64_t tokens : {1, 64, 150}) {
        WorldOptions world;
        world.ranks = 1 + int(tokens % 2);
        run_threads(world, [&](Communicator& comm) {
          set_kernel_threads(1);
          PagedBench request{
              .rows = 3, .tokens = tokens, .heads = 6, .kv_heads = 2, .head_dim = 16};
          request.window = window, request.dtype = dtype, request.repeats = 2;
          const PagedBenchResult result = run_paged_bench(comm, request);
          EXPECT_LE(result.of_bound, 1) << name_of(dtype) << " " << tokens << " " << window;
          EXPECT_EQ(result.of_bound > 0, tokens > 1) << "of one key the value is the result";
          EXPECT_TRUE(result.ok());
          EXPECT_EQ(result.forms.size(), 1u) << "forms of GPUs on CPU ranks";
          EXPECT_GT(result.forms.at("chosen").median_us, 0);
          request.forms = {"splits"};
          EXPECT_THROW(run_paged_bench(comm, request), Unsupported);
          request.heads = 5;
          EXPECT_THROW(run_paged_bench(comm, request), InvalidArgument);
        });
      }
    }
  }
  const PagedBench windowed{
      .rows = 4, .tokens = 2080, .kv_heads = 8, .head_dim = 128, .window = 64};
  EXPECT_EQ(windowed.bytes(), 4 * 64 * 8 * 128 * 2 * 2);
}

TEST(Bench, EveryOperatorMatchesItsReference) {
  for (const std::string& op : bench_ops()) {
    if (is_moe(op)) continue;      // tests/overlap/moe/bench_moe_test.cc: needs experts
    if (is_prefill(op)) continue;  // tested below: needs heads
    for (const int ranks : {1, 2, 3}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(op + " " + std::to_string(ranks) + " " + std::string(name_of(dtype)));
        WorldOptions world;
        world.ranks = ranks;
        run_threads(world, [&](Communicator& comm) {
          set_kernel_threads(1);
          const BenchResult result = run_bench(comm, {op, 37, 21, 19, dtype, 2, 2});
          EXPECT_LE(result.max_rel, result.bound);
          EXPECT_TRUE(result.bitwise_equal_runs);
          EXPECT_GT(result.overlapped.median_us, 0);
          EXPECT_LE(result.overlapped.min_us, result.overlapped.median_us);
          EXPECT_GE(result.overlapped.max_us, result.overlapped.median_us);
          EXPECT_GE(result.limit_us(), result.gemm.median_us);
          EXPECT_EQ(result.bytes == 0, ranks == 1);
        });
      }
    }
  }
}

// Both schedules give the serial result; with a codec, that of the serial encoded sums.
TEST(Bench, PrefillInTwoChunksMatchesSerial) {
  if (!has_prefill()) GTEST_SKIP() << "a build without the model";
  for (const char* format : {"none", "int8", "lossless"}) {
    for (const int ranks : {2, 3}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(std::string(format) + " " + std::to_string(ranks) + " " +
                     std::string(name_of(dtype)));
        WorldOptions world;
        world.ranks = ranks;
        run_threads(world, [&](Communicator& comm) {
          set_kernel_threads(1);
          BenchRequest request{"prefill", 37, 40, 64 * ranks, dtype, 0, 2};
          request.layers = 2;
          request.wire = Wire::parse(format);
          const BenchResult result = run_bench(comm, request);
          EXPECT_TRUE(result.ok()) << result.max_rel << " of " << result.bound;
          EXPECT_LT(result.bound, 0.5);
          EXPECT_GT(result.serial.median_us, 0);
          EXPECT_GT(result.gemm.median_us, 0);
          double minimum = INFINITY;
          for (const auto& [name, candidate] : result.candidates) {
            minimum = std::min(minimum, candidate.times.median_us);
          }
          EXPECT_EQ(result.overlapped.median_us, minimum);
          EXPECT_LE(result.overlapped.median_us, result.serial.median_us);
          EXPECT_EQ(result.chunks, result.overlapped_name.starts_with("ISO") ? 2 : 1);
          EXPECT_EQ(result.serial_name.find(" as "), std::string::npos);
          const bool uncompressed = request.wire.is_none();
          for (const std::string name : {"one chunk", "ISO"}) {
            EXPECT_TRUE(result.candidates.contains(name));
            EXPECT_EQ(result.candidates.contains(name + " as " + format), !uncompressed);
          }
          // Two sums per layer and one of the embedding.
          EXPECT_EQ(result.bytes, int64_t(5 * 2 * 37 * request.k * int64_t(size_of(dtype)) *
                                          (ranks - 1) / ranks));
          if (!uncompressed) {
            EXPECT_LT(result.wire_bytes, result.bytes);
          }
        });
      }
    }
  }
}

TEST(Bench, PrefillRefusesSizesItCannotSplit) {
  if (!has_prefill()) GTEST_SKIP() << "a build without the model";
  const BenchRequest good{"prefill", 37, 40, 128};
  EXPECT_NO_THROW(check_bench(good, 2));
  EXPECT_THROW(check_bench(good, 1), InvalidArgument);
  EXPECT_THROW(check_bench(good, 3), InvalidArgument);
  for (const auto& [n, k, layers] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 128, 4}, {40, 100, 4}, {40, 128, 0}}) {
    BenchRequest bad = good;
    bad.n = n, bad.k = k, bad.layers = layers;
    EXPECT_THROW(check_bench(bad, 2), InvalidArgument) << n << " " << k << " " << layers;
  }
}

TEST(Bench, AddNormIsPartOfTheTimedCall) {
  for (const int ranks : {1, 3}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      WorldOptions world;
      world.ranks = ranks;
      run_threads(world, [&](Communicator& comm) {
        set_kernel_threads(1);
        BenchRequest request{"gemm_ar", 37, 21, 19, dtype, 2, 2};
        request.add_norm = true;
        const BenchResult result = run_bench(comm, request);
        EXPECT_TRUE(result.ok()) << result.max_rel;
        EXPECT_GT(result.overlapped.median_us, 0);
        request.op = "gemm_rs";
        EXPECT_THROW(run_bench(comm, request), InvalidArgument);
      });
    }
  }
}

// Encoded candidates are listed next to the uncompressed ones, are within the format's bound and
// send fewer bytes; the serial baseline is never one of them.
TEST(Bench, OperatorsTakeAWireFormat) {
  for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
    for (const char* format : {"int8", "int4:g32", "lossless"}) {
      for (const int ranks : {1, 2, 3}) {
        for (const DType dtype : {DType::f32, DType::bf16}) {
          SCOPED_TRACE(std::string(op) + " " + format + " " + std::to_string(ranks) + " " +
                       std::string(name_of(dtype)));
          WorldOptions world;
          world.ranks = ranks;
          run_threads(world, [&](Communicator& comm) {
            set_kernel_threads(1);
            BenchRequest request{op, 37, 384, 256, dtype, 2, 2};
            request.wire = Wire::parse(format);
            const BenchResult result = run_bench(comm, request);
            EXPECT_TRUE(result.ok()) << result.max_rel << " of " << result.bound;
            EXPECT_LT(result.bound, request.wire.is_exact() ? 0.02 : 1.5);
            EXPECT_TRUE(
                result.candidates.contains("overlapped, 2 chunks as " + request.wire.describe()));
            EXPECT_EQ(result.serial_name.find(" as "), std::string::npos);
            if (ranks == 1) return;
            EXPECT_GT(result.wire_bytes, 0);
            EXPECT_LT(result.wire_bytes, result.bytes);
          });
        }
      }
    }
  }
}

// With a codec, a collective is timed in the same rounds as its uncompressed form and as the limits
// of its speed.
TEST(Bench, CollectivesTakeAWireFormat) {
  for (const char* op : {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}) {
    for (const char* format : {"int4:g32", "lossless"}) {
      for (const int ranks : {1, 2, 3}) {
        SCOPED_TRACE(std::string(op) + " " + format + " " + std::to_string(ranks));
        WorldOptions world;
        world.ranks = ranks;
        run_threads(world, [&](Communicator& comm) {
          BenchRequest request{op, 37, 1024, 1, DType::f32, 0, 3};
          request.wire = Wire::parse(format);
          const BenchResult result = run_bench(comm, request);
          EXPECT_TRUE(result.ok()) << result.max_rel << " of " << result.bound;
          EXPECT_TRUE(result.candidates.at("tandem").encoded);
          EXPECT_FALSE(result.candidates.at("uncompressed").encoded);
          EXPECT_EQ(result.candidates.contains("one shot"), ranks == 3 && op[4] == 'r');
          EXPECT_FALSE(result.candidates.at(result.serial_name).encoded);
          ASSERT_EQ(result.codec_times.has_value(), ranks > 1);
          if (ranks == 1) return;
          if (result.overlapped_name != "one shot") {
            EXPECT_LT(result.wire_bytes, result.bytes);
          }
          const CodecTimes& times = *result.codec_times;
          for (const BenchTimes* each : {&times.wire, &times.codec, &times.transport}) {
            EXPECT_GT(each->min_us, 0);
            EXPECT_EQ(each->rounds_us.size(), 3u);
          }
          EXPECT_EQ(result.limit_us(), std::max(times.wire.median_us,
                                                times.codec.median_us + times.transport.median_us));
        });
      }
    }
  }
}

// Data movement without loss is compared bit for bit; lossless formats get normally distributed
// values, of which they save a quarter.
TEST(Bench, DataMovementIsExact) {
  for (const char* op : {"all_gather", "all_to_all"}) {
    for (const char* format : {"none", "lossless"}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(std::string(op) + " " + format + " " + std::string(name_of(dtype)));
        WorldOptions world;
        world.ranks = 2;
        run_threads(world, [&](Communicator& comm) {
          BenchRequest request{op, 64, 2048, 1, dtype, 0, 2};
          request.wire = Wire::parse(format);
          const bool encodes = !request.wire.is_none();
          EXPECT_EQ(data_of(request), encodes ? BenchData::normal : BenchData::uniform);
          const BenchResult result = run_bench(comm, request);
          EXPECT_EQ(result.bound, 0);
          EXPECT_EQ(result.max_rel, 0);
          EXPECT_TRUE(result.ok());
          if (!encodes) return;
          const double bits = 8. * double(result.wire_bytes) / (32 * 2048);
          EXPECT_NEAR(bits, request.wire.bits_per_element(dtype), 0.3);
          EXPECT_EQ(result.fastest_encoded()->name, "tandem");
        });
      }
    }
  }
}

TEST(Bench, NormalValuesHaveZeroMeanAndUnitVariance) {
  const BenchMatrix values(DType::f32, 1, 100000, 5, BenchData::normal);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < values.tensor.elements(); ++i) {
    const double x = double(values.tensor.as<float>()[i]);
    sum += x, squares += x * x;
  }
  EXPECT_NEAR(sum / 100000, 0, 0.02);
  EXPECT_NEAR(squares / 100000, 1, 0.02);
}

TEST(Bench, ReportsFastestUncompressedAndFastestEncoded) {
  BenchResult result;
  result.gemm = taking(100);
  result.gemm.rounds_us = {100};
  const auto add = [&](const char* name, Strategy form, double us, bool encoded) {
    BenchTimes times = taking(us);
    times.rounds_us = {us};
    result.add(name, form, times, encoded);
  };
  EXPECT_FALSE(result.fastest_uncompressed() || result.fastest_encoded());
  add("serial", Strategy::serial, 140, false);
  add("fused", Strategy::overlapped, 110, false);
  add("chunked", Strategy::overlapped, 120, false);
  add("serial as int8", Strategy::serial, 115, true);
  add("fused as int8", Strategy::overlapped, 104, true);
  result.set_efficiency(EctOf::medians);
  EXPECT_EQ(result.fastest_uncompressed()->name, "fused");
  EXPECT_EQ(result.fastest_encoded()->name, "fused as int8");
  EXPECT_NEAR(result.over_gemm(result.fastest_encoded()->times), 0.04, 1e-9);
  EXPECT_DOUBLE_EQ(result.efficiency_of(result.fastest_uncompressed()->times), 0.75);
  EXPECT_DOUBLE_EQ(result.efficiency_of(result.fastest_encoded()->times), 0.9);
}

// CodecWork really decodes what it encodes, tails included.
TEST(Bench, CodecWorkDecodesWhatItEncodes) {
  const Wire wire = Wire::parse("int8");
  const int64_t maximum = 2 * 65536 + 1000;
  const BenchMatrix from(DType::f32, 1, maximum, 1), to(DType::f32, 1, maximum, 2);
  CodecWork(wire, {{maximum}, {maximum, 70000}}, from.tensor, to.tensor).run();
  double worst = 0;
  for (int64_t i = 0; i < maximum; ++i) {
    // Messages of equal size are decoded in one place: that of the first.
    const int64_t chunk = i / 65536, source = chunk == 1 ? i - 65536 : i;
    if (i >= 65536 && i < 70000) continue;  // decoded last, from the tail of the shorter message
    worst = std::max(worst, std::fabs(double(to.tensor.as<float>()[i]) -
                                      double(from.tensor.as<float>()[source])));
  }
  EXPECT_GT(worst, 0);
  EXPECT_LE(worst, wire.error_bound());
}

// No measured time is below the wire time of its bytes on the emulated link.
TEST(Bench, NoTimeIsBelowTheWireTime) {
  WorldOptions world;
  world.ranks = 2;
  world.link = EmulatedLink::parse("20MB/s,1ms");
  run_threads(world, [&](Communicator& comm) {
    set_kernel_threads(1);
    const BenchResult result = run_bench(comm, {"ag_gemm", 64, 32, 512, DType::f32, 1, 3});
    EXPECT_EQ(result.bytes, 32 * 512 * 4);
    const double min_us = double(result.bytes) / 20e6 * 1e6 + 1000;
    EXPECT_GE(result.wire.min_us, min_us * 0.99);
    EXPECT_GE(result.overlapped.min_us, min_us * 0.99);
  });
}

TEST(Bench, SerialIsTheFastestCandidateWithoutOverlap) {
  BenchResult result;
  result.gemm = taking(15);
  result.add("serial_nccl", Strategy::serial, taking(29));
  result.add("one_shot", Strategy::serial, taking(22));
  result.add("two_shot", Strategy::serial, taking(25));
  result.add("fused", Strategy::overlapped, taking(18));
  EXPECT_EQ(result.serial_name, "one_shot");
  EXPECT_EQ(result.serial.median_us, 22);
  EXPECT_EQ(result.overlapped_name, "fused");
  EXPECT_EQ(result.candidates.size(), 4u);
  EXPECT_EQ(result.candidates.at("two_shot").form, Strategy::serial);
}

TEST(Bench, ListsAllCandidatesAndSerialIsTheFastestOfItsForm) {
  run_threads({}, [](Communicator& comm) {
    set_kernel_threads(1);
    const BenchResult r = run_bench(comm, {"ag_gemm", 64, 32, 32, DType::f32, 1, 3});
    ASSERT_EQ(r.candidates.size(), 3u);
    EXPECT_EQ(r.serial.median_us, std::min(r.candidates.at("unfused").times.median_us,
                                           r.candidates.at("serial, 1 chunk").times.median_us));
    EXPECT_EQ(r.overlapped.median_us, r.candidates.at("overlapped, 1 chunk").times.median_us);
    EXPECT_FALSE(r.nccl.has_value());
  });
}

// Example of nccl-tests' doc/PERFORMANCE.md: 8 ranks, 1 GB in 1 ms.
TEST(Bench, ReceiptSaysWhatAnOperatorWouldRun) {
  const BenchRequest request{"gemm_rs", 64, 32, 16, DType::bf16};
  const auto receipt_of = [&](double overlapped_us, int ranks = 2) {
    BenchResult result;
    result.add(kUnfused, Strategy::serial, taking(1));  // which no operator runs
    result.add("serial, 1 chunk", Strategy::serial, taking(10));
    result.add("overlapped, 2 chunks", Strategy::overlapped, taking(overlapped_us));
    return choose_receipt(request, result, ranks);
  };
  const Receipt fast = receipt_of(8), slow = receipt_of(9.9), alone = receipt_of(8, 1);
  EXPECT_EQ(fast.ran, Strategy::overlapped);
  EXPECT_EQ(fast.candidate, "overlapped, 2 chunks");
  EXPECT_EQ(fast.speedup, 1.25);
  EXPECT_EQ(receipt_lines({fast}, 100), "");
  EXPECT_EQ(slow.ran, Strategy::serial);
  EXPECT_EQ(receipt_lines({slow, fast}, 60),
            "    gemm_rs: m 64 n 32 k 16 bf16, 2 ranks: automatic would\n"
            "      run as serial: no overlapped candidate is 2 % faster:\n"
            "      9.9 us, serial 10.0 us\n");
  EXPECT_EQ(alone.ran, Strategy::serial);
  EXPECT_EQ(alone.why, "a group of 1 rank has nothing to overlap");
  EXPECT_EQ(receipt_lines({alone}, 100), "");
}

TEST(Bench, ReceiptsAreOfTheMeasuredTimes) {
  for (const int ranks : {1, 2}) {
    run_threads({.ranks = ranks}, [&](Communicator& comm) {
      set_kernel_threads(1);
      const BenchRequest request{"ag_gemm", 37, 21, 19, DType::f32, 2, 2};
      const BenchResult result = run_bench(comm, request);
      ASSERT_EQ(result.receipts.size(), 1u);
      const auto us = [&](const std::string& name) {
        return result.candidates.at(name).times.median_us;
      };
      const double serial = us("serial, 1 chunk"), overlapped = us("overlapped, 2 chunks");
      const bool wins = ranks > 1 && overlapped < 0.98 * serial;
      const nlohmann::json row = to_json(request, result, {comm, "memory"}).at("receipt");
      EXPECT_EQ(row.at("ran"), wins ? "overlapped" : "serial");
      EXPECT_EQ(row.at("asked"), "automatic");
      EXPECT_EQ(row.at("group"), ranks);
      EXPECT_EQ(row.at("why") == "", wins);
      EXPECT_TRUE(run_bench(comm, {"all_reduce", 8, 8, 1, DType::f32, 0, 1}).receipts.empty());
    });
  }
}

TEST(Bench, BandwidthsMatchNcclTests) {
  BenchRequest request{"all_reduce", 1'000'000, 250, 1, DType::f32};
  EXPECT_DOUBLE_EQ(bandwidth(request, 8, 1000).algbw, 1000);
  EXPECT_DOUBLE_EQ(bandwidth(request, 8, 1000).busbw, 1750);
  request.op = "all_gather";
  EXPECT_DOUBLE_EQ(bandwidth(request, 8, 1000).busbw, 875);
  request.op = "broadcast";
  EXPECT_DOUBLE_EQ(bandwidth(request, 8, 1000).busbw, 1000);
  EXPECT_DOUBLE_EQ(bandwidth(request, 1, 1000).busbw, 0);
  EXPECT_DOUBLE_EQ(tflops({"ag_gemm", 1000, 1000, 1000, DType::bf16}, 4, 500), 1);
}

TEST(Bench, TimesWithinTheNoiseAreNotExposed) {
  BenchResult result;
  result.gemm.rounds_us = {100, 101, 99, 102, 98};
  result.overlapped.rounds_us = {104, 105, 103, 106, 102};
  for (const double serial : {20, -20}) {
    result.serial.rounds_us = result.gemm.rounds_us;
    for (double& round : result.serial.rounds_us) round += serial;
    result.set_efficiency(EctOf::differences);
    EXPECT_EQ(result.exposes(), serial > 0);
  }
  result.serial.rounds_us = {110, 90, 120, 105, 80};  // faster than the GEMM in two rounds
  result.set_efficiency(EctOf::differences);
  EXPECT_GT(result.ect.serial_us, 0);
  EXPECT_FALSE(result.exposes());
}

TEST(Bench, TimelineHasOneCallPerRank) {
  for (const std::string op : {"ag_gemm", "gemm_rs"}) {
    WorldOptions world;
    world.ranks = 2;
    world.link = EmulatedLink::parse("20MB/s,1ms");
    run_threads(world, [&](Communicator& comm) {
      set_kernel_threads(1);
      BenchRequest request{op, 64, 256, 256, DType::f32, 2, 3};
      EXPECT_TRUE(run_bench(comm, request).timeline.empty());
      request.timeline = true;
      const BenchResult result = run_bench(comm, request);
      ASSERT_EQ(result.timeline.size(), 2u);
      for (int rank = 0; rank < 2; ++rank) {
        const RankEvents& events = result.timeline[size_t(rank)];
        EXPECT_EQ(events.rank, rank);
        int products = 0, transfers = 0;
        for (const SpanEvent& event : events.events) {
          EXPECT_LE(event.begin, event.end);
          EXPECT_GE(event.end, events.origin) << name_of(event.kind);
          products += event.kind == SpanKind::gemm;
          transfers += event.kind == SpanKind::transfer;
          EXPECT_TRUE(event.kind != SpanKind::transfer || event.peer == 1 - rank);
        }
        EXPECT_GE(products, 2) << op;
        EXPECT_EQ(transfers, 2) << op << ": one of each chunk";
      }
    });
  }
}

TEST(Bench, ArrowsOfATimelineKeepTheirOrderWithClocksApart) {
  const WorldOptions world{.ranks = 3, .link = EmulatedLink::parse("20MB/s,1ms")};
  run_threads(world, [&](Communicator& comm) {
    set_kernel_threads(1);
    recorder().shift_clock(std::chrono::seconds(7000 * comm.rank()), 30 * comm.rank());
    BenchRequest request{"gemm_rs", 96, 256, 256, DType::f32, 2, 3};
    request.timeline = true;
    const auto ranks = run_bench(comm, request).timeline;
    ASSERT_EQ(ranks.size(), 3u);
    EXPECT_EQ(ranks[0].clock_bound_ns, 0);
    EXPECT_GT(ranks[2].clock_bound_ns, 0);
    const auto found = arrows(ranks);
    EXPECT_FALSE(found.empty());
    for (const Arrow& arrow : found) {
      const RankEvents &from = ranks[arrow.from], &to = ranks[arrow.to];
      const std::chrono::nanoseconds bound(from.clock_bound_ns + to.clock_bound_ns);
      EXPECT_GE(to.events[arrow.wait].end + bound, from.events[arrow.transfer].begin);
    }
    for (const RankEvents& rank : ranks) {
      for (const SpanEvent& event : rank.events) {
        const std::chrono::nanoseconds bound(rank.clock_bound_ns + ranks[0].clock_bound_ns);
        EXPECT_LT(std::chrono::abs(event.begin - ranks[0].events.front().begin),
                  std::chrono::seconds(3000) + bound);
      }
    }
    recorder().shift_clock({}, 0);
  });
}

TEST(Bench, UnsupportedRequestsAreRefused) {
  run_threads({}, [](Communicator& comm) {
    EXPECT_FALSE(run_bench(comm, {"broadcast", 1, 1, 1, DType::f32, 0, 1}).baseline.empty());
    EXPECT_THROW(run_bench(comm, {"gemm", 1, 1, 1, DType::f32, 0, 1}), InvalidArgument);
    EXPECT_THROW(run_bench(comm, {"ag_gemm", 0, 1, 1, DType::f32, 0, 1}), InvalidArgument);
    EXPECT_THROW(run_bench(comm, {"ag_gemm", 1, 1, 1, DType::i32, 0, 1}), InvalidArgument);
  });
}

}  // namespace
}  // namespace tandem
