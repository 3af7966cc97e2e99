// A new operator needs a folder, a test and a line in the registry: then it is checked, agreed on,
// tuned, timed and reported like the others. The same holds for a new exact codec. The
// one descriptor gives the same text everywhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/bench.h"
#include "comm/exec.h"
#include "core/system/process/data_file.h"
#include "gemm/gemm.h"
#include "overlap/ag_gemm/operator.h"
#include "overlap/registry.h"
#include "tandem/collectives.h"
#include "tandem/cuda.h"
#include "tests/seams/gather_scale.h"
#include "tests/seams/mirror.h"
#include "tune/tuner.h"

namespace tandem::test {
namespace {

void on_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  WorldOptions world;
  world.ranks = ranks;
  run_threads(world, [&](Communicator& comm) {
    set_kernel_threads(1);
    body(comm);
  });
}

TEST(NewOperator, EveryCandidateMatchesTheReferencesBits) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t m : {1, 37, 160}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        on_ranks(ranks, [&](Communicator& comm) {
          const OpDesc desc = gather_scale_desc(comm, m, 11, dtype);
          const auto made = make_operator(kGatherScaleRow, comm, desc, {}, Choosing::first);
          const Memory x(size_t(desc.x.rows * 11) * size_of(dtype)), factor(size_of(dtype));
          const Memory out(size_t(m * 11) * size_of(dtype)), expected(out.bytes());
          std::fill_n(x.data(), x.bytes(), std::byte(63 - comm.rank()));
          std::fill_n(factor.data(), factor.bytes(), std::byte(64));
          const Tensor x_rows = x.view(dtype, {desc.x.rows, 11}), by = factor.view(dtype, {1, 1});
          const Tensor wanted = expected.view(dtype, {m, 11}), got = out.view(dtype, {m, 11});
          kGatherScaleRow.reference(comm, {x_rows, by, wanted});
          EXPECT_GE(made->candidates().size(), 2u);
          for (const Candidate& candidate : made->candidates()) {
            std::fill_n(out.data(), out.bytes(), std::byte(0));
            candidate.run({x_rows, by, got});
            EXPECT_TRUE(std::equal(out.data(), out.data() + out.bytes(), expected.data()))
                << candidate.name << ", " << ranks << " ranks, m " << m;
          }
        });
      }
    }
  }
}

TEST(NewOperator, RanksAgreeOnItAndCallsAreChecked) {
  on_ranks(2, [](Communicator& comm) {
    const auto make = [&](int64_t m) {
      return make_operator(kGatherScaleRow, comm, gather_scale_desc(comm, m, 4, DType::f32),
                           {Strategy::serial, 0}, Choosing::fastest);
    };
    EXPECT_THROW(make(8 + comm.rank()), Mismatch);
    const auto made = make(8);
    EXPECT_EQ(made->chosen().form, Strategy::serial);
    const Memory memory(1024);
    const Tensor x = memory.view(DType::f32, {4, 4}), out = memory.view(DType::f32, {8, 4});
    const Memory one(4);
    EXPECT_THROW(made->run({x, one.view(DType::f32, {1, 1}), out}), InvalidArgument);
    EXPECT_THROW(made->run({out, one.view(DType::f32, {1, 1}), out}), InvalidArgument);
  });
}

TEST(NewOperator, BenchmarkTimesAndChecksIt) {
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](Communicator& comm) {
      const BenchResult result = run_bench(comm, {"gather_scale", 37, 1, 19, DType::f32, 0, 3});
      EXPECT_TRUE(result.ok()) << result.max_rel;
      EXPECT_EQ(result.candidates.count("unfused"), 1u);
      EXPECT_EQ(result.candidates.count("serial, 1 chunk"), 1u);
      EXPECT_EQ(result.candidates.count("overlapped, 1 chunk"), 1u);
      EXPECT_GT(result.overlapped.median_us, 0);
    });
  }
}

TEST(NewOperator, EveryCandidateIsExactOnGpus) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  for (const int ranks : {1, 2, 4}) {
    if (gpu_count() > 1 && gpu_count() < ranks) continue;
    WorldOptions options;
    options.ranks = ranks;
    options.ranks_per_gpu = gpu_count() >= ranks ? 1 : ranks;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      run_gpus(options, [&](Communicator& comm) {
        constexpr int64_t m = 37, k = 24;
        const OpDesc desc = gather_scale_desc(comm, m, k, dtype);
        const size_t size = size_of(dtype);
        const Memory all_x(size_t(m * k) * size), factor(size), expected(all_x.bytes());
        const Tensor host_x = all_x.view(dtype, {m, k}), by = factor.view(dtype, {1, 1});
        for (size_t i = 0; i < all_x.bytes(); ++i) all_x.data()[i] = std::byte(60 + i % 5);
        std::fill_n(factor.data(), size, std::byte(64));
        kGatherScaleRow.gemm(host_x, by, expected.view(dtype, {m, k}));

        const Device device = device_of(comm);
        const Memory x_memory(size_t(desc.x.rows * k) * size, device), by_memory(size, device),
            out_memory(all_x.bytes(), device);
        const Tensor x = x_memory.view(dtype, {desc.x.rows, k});
        const Tensor on_gpu = by_memory.view(dtype, {1, 1}), out = out_memory.view(dtype, {m, k});
        const int64_t first = shard_of(m, comm.size(), comm.rank()).begin;
        copy(make_exec(comm), host_x.rows(first, desc.x.rows), x);
        copy(make_exec(comm), by, on_gpu);
        const auto made = make_operator(kGatherScaleRow, comm, desc, {}, Choosing::fastest);
        EXPECT_EQ(made->candidates().size(), 2u);
        const Memory found(all_x.bytes());
        for (const Candidate& candidate : made->candidates()) {
          clear(make_exec(comm), out);
          candidate.run({x, on_gpu, out});
          synchronize(comm);
          copy(make_exec(comm), out, found.view(dtype, {m, k}));
          EXPECT_TRUE(std::equal(found.data(), found.data() + found.bytes(), expected.data()))
              << candidate.name << ", " << ranks << " ranks";
        }
        EXPECT_THROW(made->run({x, on_gpu, x}), InvalidArgument);
      });
    }
  }
}

TEST(Registry, RowsMatchTheirDescriptors) {
  const OpDesc whole{.m = 24, .n = 16, .k = 32, .dtype = DType::bf16};
  for (const int ranks : {1, 4}) {
    on_ranks(ranks, [&](Communicator& comm) {
      for (const OperatorRow* row : operators()) {
        if (row == &kGatherScaleRow) continue;  // every rank scales all rows
        EXPECT_EQ(find_operator(row->name), row);
        const OpDesc desc = describe_shard(*row, comm, whole);
        EXPECT_EQ(desc.op, row->name);
        EXPECT_EQ(desc.collective, row->collective) << row->name;
        EXPECT_EQ(desc.gradient, row->gradient) << row->name;
        EXPECT_EQ(row->flops(desc) * ranks, row->flops(whole)) << row->name;
        EXPECT_EQ(row->bytes(ranks, desc) > 0, ranks > 1) << row->name;
      }
    });
  }
  EXPECT_EQ(find_operator("gather_scale"), &kGatherScaleRow);
  EXPECT_EQ(find_operator("scale_gather"), nullptr);
}

// An exact codec needs a file, an entry in the list and a test: then it has a name, works with
// every collective, and is timed and checked.
TEST(NewCodec, CollectivesOperatorsAndBenchmarkSupportIt) {
  static const Codec number = codec::add_whole_codec(mirror());
  const Wire wire = Wire::parse("mirror");
  EXPECT_EQ(wire.codec, number);
  EXPECT_EQ(wire.describe(), "mirror");
  EXPECT_TRUE(wire.is_exact());
  EXPECT_EQ(wire.bytes(10, DType::bf16), 20u);
  EXPECT_THROW(Wire::parse("mirror:g32"), InvalidArgument);
  for (const int ranks : {1, 2, 3}) {
    on_ranks(ranks, [&](Communicator& comm) {
      const int64_t count = 5000 + 3;
      const Memory memory(size_t(count) * 4), summed(size_t(count) * 4);
      const Tensor coded = memory.view(DType::f32, {count, 1});
      const Tensor expected = summed.view(DType::f32, {count, 1});
      for (int64_t i = 0; i < count; ++i) {
        coded.as<float>()[i] = expected.as<float>()[i] = float(i % 97) / float(comm.rank() + 3);
      }
      all_reduce(comm, coded, wire);
      all_reduce(comm, expected);
      EXPECT_TRUE(std::equal(memory.data(), memory.data() + memory.bytes(), summed.data()));
      for (const char* op : {"all_gather", "ag_gemm", "gemm_rs", "gemm_ar"}) {
        BenchRequest request{op, 37, 21, 19, DType::bf16, 0, 3};
        request.wire = wire;
        EXPECT_TRUE(run_bench(comm, request).ok()) << op;
      }
    });
  }
}

TEST(Descriptor, GivesTheSameTextEverywhere) {
  on_ranks(2, [](Communicator& comm) {
    AgGemm::Shape shape{96, 40 + comm.rank(), 24};
    shape.keep_gathered = shape.weight_kn = true;
    const OpDesc desc = ag_gemm_desc(comm, shape);
    const std::string n = std::to_string(40 + comm.rank());
    EXPECT_EQ(describe(desc), "m 96 n " + n + " k 24 f32 keep kn");
    EXPECT_EQ(agreement(desc), "m 96 k 24 f32 kn");
    const nlohmann::json expected = {{"op", "ag_gemm"},  {"m", 96},        {"n", shape.n},
                                     {"k", 24},          {"dtype", "f32"}, {"keep_gathered", true},
                                     {"weight_kn", true}};
    EXPECT_EQ(to_json(desc), expected);
  });
  OpDesc scaled{.m = 1, .n = 16, .k = 32, .dtype = DType::e4m3, .scaling = Scaling::row};
  EXPECT_EQ(describe(scaled), "m 1 n 16 k 32 e4m3 to bf16, a scale per row");
}

// Known at construction, as on GPUs: the shape declares out and bias.
TEST(SameCalls, F32ResultIsDeclaredByTheShape) {
  on_ranks(2, [](Communicator& comm) {
    const int64_t m = 6, n = 8, k = 16;
    const Shard local = shard_of(m, comm.size(), comm.rank());
    const Memory x_memory(size_t(m * k) * 2), w_memory(size_t(n * k) * 2);
    for (int64_t i = 0; i < m * k; ++i) {
      x_memory.view(DType::bf16, {m * k}).as<BFloat16>()[i] = BFloat16::from_float(float(i % 7));
    }
    for (int64_t i = 0; i < n * k; ++i) {
      w_memory.view(DType::bf16, {n * k}).as<BFloat16>()[i] = BFloat16::from_float(float(i % 5));
    }
    const Tensor x = x_memory.view(DType::bf16, {m, k}), w = w_memory.view(DType::bf16, {n, k});
    const Memory wide(size_t(m * n) * 4), same(size_t(m * n) * 4), narrow(size_t(m * n) * 2);
    const Memory bias_memory(size_t(n) * 4);
    const Tensor bias = bias_memory.view(DType::f32, {n});
    std::fill_n(bias.as<float>(), n, 0.5f);

    AgGemm::Shape shape{.m = m, .n = n, .k = k, .dtype = DType::bf16, .bias = true};
    AgGemm summed(comm, shape);
    shape.out_dtype = DType::f32;
    AgGemm declared(comm, shape);
    EXPECT_EQ(describe(ag_gemm_desc(comm, shape)), "m 6 n 8 k 16 bf16 to f32 bias");
    const Tensor rows = x.rows(local.begin, local.count), out = wide.view(DType::f32, {m, n});
    const Tensor other = same.view(DType::f32, {m, n});
    declared.run(rows, w, out, &bias);
    summed.run(rows, w, other, &bias);
    EXPECT_TRUE(std::equal(out.as<float>(), out.as<float>() + m * n, other.as<float>()));
    EXPECT_THROW(declared.run(rows, w, narrow.view(DType::bf16, {m, n}), &bias), InvalidArgument);

    GemmRs rs(comm, {.m = m, .n = n, .k = k, .dtype = DType::bf16, .out_dtype = DType::f32});
    rs.run(x, w, wide.view(DType::f32, {local.count, n}));
    EXPECT_THROW(rs.run(x, w, narrow.view(DType::bf16, {local.count, n})), InvalidArgument);
    EXPECT_THROW(
        GemmAr(comm, {.m = m, .n = n, .k = k, .dtype = DType::bf16, .out_dtype = DType::f32}),
        InvalidArgument);
  });
}

// Keys of existing tuner files.
TEST(Descriptor, KeysOfEarlierFilesStayValid) {
  const std::string cpu = "cpu | threads |  x2 | threads 1 | ag_gemm m 96 n 40 k 24 f32";
  EXPECT_EQ(current_key(cpu + " keep bias kn"), cpu + " keep bias kn");
  EXPECT_EQ(current_key(cpu), cpu);
  const std::string gpu = "H200 | nccl | nvlink x4 | ag_gemm m 96 n 40 k 24 bf16";
  EXPECT_EQ(current_key(gpu + " bias kn keep"), gpu + " keep bias kn");
  EXPECT_EQ(current_key(gpu + " bias keep"), gpu + " keep bias");
  EXPECT_EQ(current_key(gpu + " kn keep"), gpu + " keep kn");
  EXPECT_EQ(current_key(gpu + " keep"), gpu + " keep");
  EXPECT_EQ(current_key(cpu + " as int8 or plain"), cpu + " as int8 or uncompressed");
  EXPECT_EQ(current_key(cpu + " as int8 or uncompressed"), cpu + " as int8 or uncompressed");
  EXPECT_EQ(current_key("H200 | moe 4 as int8 or plain for backward"),
            "H200 | moe 4 as int8 or uncompressed for backward");
}

// Names of candidates in existing tuner files.
TEST(Descriptor, CandidatesOfEarlierFilesAreFoundByTheirCurrentNames) {
  using Entry = std::pair<std::string, nlohmann::json>;
  const auto entry = [](const std::vector<std::string>& names) {
    nlohmann::json times;
    for (size_t i = 0; i < names.size(); ++i) times[names[i]] = i + 1.0;
    return nlohmann::json{{"measured_us", times}, {"spread", 0.1}};
  };
  const std::string rs = "H200 | nccl | nvlink x4 | gemm_rs", shape = " m 96 n 40 k 24 bf16";
  EXPECT_EQ(current_entry(rs + shape, entry({"adding", "fused", "plain", "chunked"})),
            Entry(rs + shape, entry({"fused", "fused_cutlass", "serial_kernels", "chunked"})));
  const auto now = entry({"fused", "fused_cutlass", "chunked"});
  EXPECT_EQ(current_entry(rs + shape, now), Entry(rs + shape, now));
  const auto plans = entry({"shards in 2 chunks", "stored, local tiles last"});
  EXPECT_EQ(current_entry(rs + " adding" + shape,
                          entry({"shards in 2 pieces", "stored, own tiles last"})),
            Entry(rs + " fused" + shape, plans));
  EXPECT_EQ(current_entry(rs + " fused" + shape, plans), Entry(rs + " fused" + shape, plans));
  const auto tiles = entry({"128x128, sending at 100 %"});
  EXPECT_EQ(current_entry(rs + " fused" + shape, tiles),
            Entry(rs + " fused_cutlass" + shape, tiles));
  EXPECT_EQ(current_entry("cpu | all_gather m 4", entry({"plain", "one shot"})),
            Entry("cpu | all_gather m 4", entry({"uncompressed", "one shot"})));
  EXPECT_EQ(
      current_entry("H200 | moe 4", entry({"sorted beside, 8 blocks sort, 4 sum as int8",
                                           "fused, 8 blocks send, 2 parts plain, back as int8"})),
      Entry("H200 | moe 4",
            entry({"overlapped_sort, 8 blocks sort, 4 sum as int8",
                   "fused, 8 blocks send, 2 column groups uncompressed, back as int8"})));
}

TEST(Data, ShippedTimesAreFoundWithCurrentKeys) {
  EXPECT_FALSE(data_file("shipped_tuner.json").empty());
  EXPECT_EQ(data_file("of another name"), "");
  EXPECT_GT(shipped_times().size(), 100u);
  for (const auto& [key, entry] : shipped_times().items()) {
    EXPECT_EQ(current_entry(key, entry), std::pair(key, entry));
  }
}

}  // namespace
}  // namespace tandem::test
