// Without a GPU: cuDNN has kernels for an H100 for every attention that the models run, and
// deterministic backward passes are split as documented.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "kernels/cuda/cudnn/attention.h"
#include "kernels/cuda/cudnn/groups.h"
#include "kernels/cuda/cudnn/plugin_loader.h"

namespace tandem::gpu {
namespace {

constexpr int kSm = 90;
constexpr const char* kH100 = R"({
  "deviceName": "NVIDIA H100 80GB HBM3", "cudaDeviceId": 0, "pciDeviceId": 0, "isTccDriver": 0,
  "smVersion": 900, "deviceVer": 900, "deviceVersion": 900, "driverVer": 13000, "driverVersion": 13000,
  "multiProcessorCount": 132, "warpSize": 32, "supportCoopLaunch": 1,
  "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
  "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxCtasPerSM": 32,
  "regsPerBlock": 65536, "maxRegistersPerSM": 65536,
  "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
  "reservedSharedMemoryPerBlock": 1024,
  "smClockRateKHz": 1980000, "memClockRateKHz": 2619000, "l2CacheSize": 52428800,
  "totalGlobalMem": 85520809984})";

/// cuDNN opens the driver by its name, which a loaded library of that name satisfies: the toolkit's
/// stub, whose every call fails.
bool has_driver() {
  return dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) ||
         dlopen(TANDEM_CUDA_STUBS "/libcuda.so", RTLD_NOW | RTLD_GLOBAL);
}

/// Rows of q, k and v, and of nothing else, unless `qkv_stride` is more.
struct Case {
  const char* model;
  AttentionShape shape;
  int64_t qkv_stride = 0;
  int64_t window = 0;
};

void expect_kernels(const TandemCudnn& cudnn, const Case& c, const AttentionShape& shape,
                    TandemCudnnPass pass, bool deterministic) {
  const AttentionShape& whole = c.shape;
  const TandemCudnnShape asked{
      .batch = shape.batch,
      .seq = shape.seq,
      .heads = shape.heads,
      .kv_heads = shape.kv_heads,
      .head_dim = shape.head_dim,
      .qkv_stride =
          c.qkv_stride ? c.qkv_stride : (whole.heads + 2 * whole.kv_heads) * whole.head_dim,
      .out_stride = whole.heads * whole.head_dim,
      .scale = float(1 / std::sqrt(double(shape.head_dim))),
      .pass = pass,
      .deterministic = deterministic,
      .window = c.window};
  EXPECT_EQ(cudnn.check_shape(&asked, kH100, kSm), 0)
      << c.model << ": " << cudnn.error_text()
      << fmt::format(": batch {} seq {} heads {}/{} head_dim {} window {}, {}{}", shape.batch,
                     shape.seq, shape.heads, shape.kv_heads, shape.head_dim, c.window,
                     pass == kTandemCudnnForward ? "forward" : "backward",
                     deterministic ? ", deterministic" : "");
}

TEST(CudnnGraphs, EveryModelsAttentionHasKernels) {
  if (!has_driver()) GTEST_SKIP() << "needs libcuda.so.1, or the CUDA toolkit's stub of it";
  const CudnnPlugin& plugin = cudnn_plugin();
  if (!plugin.functions) GTEST_SKIP() << "cuDNN is absent: " << plugin.absent;
  const Case cases[] = {{"llama-8b", {1, 8192, 32, 8, 128}},
                        {"llama-8b", {4, 2048, 32, 8, 128}},
                        {"llama-8b", {1, 32768, 32, 8, 128}},
                        {"llama-8b, TP 8", {1, 8192, 4, 1, 128}},
                        {"qwen3-8b", {2, 4096, 32, 8, 128}},
                        {"MLP in the same rows", {1, 8192, 32, 8, 128}, 6144 + 2 * 14336},
                        {"llama-1b", {2, 2048, 32, 8, 64}},
                        {"llama-8b, window 1024", {1, 8192, 32, 8, 128}, 0, 1024},
                        {"llama-8b, window 1024", {1, 32768, 32, 8, 128}, 0, 1024},
                        {"mistral-7b", {1, 8192, 32, 8, 128}, 0, 4096},
                        {"small, window 1", {3, 200, 4, 4, 32}, 0, 1},
                        {"small, window 100", {1, 513, 4, 1, 64}, 0, 100},
                        {"tiny", {2, 128, 4, 4, 16}},
                        {"tiny", {2, 72, 4, 2, 16}},
                        {"small", {3, 200, 4, 4, 32}},
                        {"small", {1, 513, 4, 1, 64}},
                        {"head_dim 80", {2, 65, 8, 2, 80}}};
  for (const Case& c : cases) {
    expect_kernels(*plugin.functions, c, c.shape, kTandemCudnnForward, false);
    expect_kernels(*plugin.functions, c, c.shape, kTandemCudnnBackward, false);
    const AttentionGroup group = choose_group(c.shape, kAttentionWorkspace);
    AttentionShape group_shape = c.shape;
    group_shape.batch = group.batch, group_shape.kv_heads = group.kv_heads;
    group_shape.heads = group.kv_heads * (c.shape.heads / c.shape.kv_heads);
    expect_kernels(*plugin.functions, c, group_shape, kTandemCudnnBackward, true);
  }
}

TEST(CudnnGraphs, ShapesWithoutKernelsAreReported) {
  if (!has_driver()) GTEST_SKIP() << "needs libcuda.so.1, or the CUDA toolkit's stub of it";
  const CudnnPlugin& plugin = cudnn_plugin();
  if (!plugin.functions) GTEST_SKIP() << "cuDNN is absent: " << plugin.absent;
  TandemCudnnShape shape{.batch = 1,
                         .seq = 128,
                         .heads = 4,
                         .kv_heads = 4,
                         .head_dim = 20,
                         .qkv_stride = 240,
                         .out_stride = 80,
                         .scale = 1,
                         .pass = kTandemCudnnForward,
                         .deterministic = 0,
                         .window = 0};
  EXPECT_EQ(plugin.functions->check_shape(&shape, kH100, kSm), 1);
  EXPECT_NE(std::string(plugin.functions->error_text()), "");
}

TEST(AttentionGroups, TakeAsMuchAsTheLimitAllows) {
  constexpr int64_t kGib = int64_t(1) << 30;
  const auto expect_group = [](const AttentionShape& shape, int64_t limit, int64_t batch,
                               int64_t kv_heads) {
    const AttentionGroup group = choose_group(shape, limit);
    EXPECT_EQ(group.batch, batch) << fmt::format("seq {}, {} bytes", shape.seq, limit);
    EXPECT_EQ(group.kv_heads, kv_heads) << fmt::format("seq {}, {} bytes", shape.seq, limit);
  };
  expect_group({4, 2048, 32, 8, 128}, 8 * kGib, 4, 8);
  expect_group({6, 8192, 32, 8, 128}, 8 * kGib, 2, 8);
  expect_group({1, 8192, 32, 8, 128}, 8 * kGib, 1, 8);
  expect_group({2, 16384, 32, 8, 128}, 8 * kGib, 1, 4);
  expect_group({2, 32768, 32, 8, 128}, 8 * kGib, 1, 1);
  expect_group({2, 65536, 32, 8, 128}, 8 * kGib, 1, 1);  // more than the limit, but the least
  expect_group({2, 1024, 6, 6, 64}, 4 << 20, 1, 2);      // divides 6
  expect_group({2, 1024, 6, 6, 64}, 0, 1, 1);
}

TEST(AttentionGroups, StartAtAlignedLogSums) {
  for (const int64_t seq : {1000, 1001, 1002, 1003}) {
    for (const int64_t kv_heads : {1, 2, 3, 8}) {
      for (const int64_t batch : {1, 2, 6}) {
        const AttentionShape shape{batch, seq, 2 * kv_heads, kv_heads, 64};
        const AttentionGroup group = choose_group(shape, 0);
        EXPECT_EQ(shape.batch % group.batch, 0);
        EXPECT_EQ(shape.kv_heads % group.kv_heads, 0);
        EXPECT_TRUE(group.batch == 1 || group.kv_heads == kv_heads);
        const bool whole = group.batch == batch && group.kv_heads == kv_heads;
        EXPECT_TRUE(whole || group.batch * group.kv_heads * 2 * seq % 4 == 0);
      }
    }
  }
  EXPECT_EQ(choose_group({2, 1001, 8, 8, 64}, 0).kv_heads, 4);
}

}  // namespace
}  // namespace tandem::gpu
