// Device of a command without --device, on described machines.
#include "comm/world/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem {
namespace {

using testing::HasSubstr;

Gpus make_gpus(std::vector<std::string> architectures) {
  Gpus gpus;
  gpus.count = int(architectures.size());
  gpus.name = "NVIDIA H200";
  gpus.memory_gib = 140;
  gpus.architectures = std::move(architectures);
  return gpus;
}

/// Expects CPU ranks, and a note with `why`.
void expect_cpu(const Gpus& gpus, const DeviceRequest& request, const std::string& why) {
  const DeviceChoice choice = choose_device(gpus, request);
  EXPECT_FALSE(choice.on_gpus) << choice.note;
  EXPECT_THAT(choice.note, HasSubstr(why));
}

TEST(DeviceChoice, IsGpusIfEachRankGetsOne) {
  const DeviceChoice one = choose_device(make_gpus({"sm_90"}), {});
  EXPECT_TRUE(one.on_gpus);
  EXPECT_EQ(one.note, "device: gpu (1x NVIDIA H200); --device cpu uses the CPU");
  const Gpus two = make_gpus({"sm_90", "sm_90"});
  EXPECT_EQ(choose_device(two, {.ranks = 1}).note, one.note);
  EXPECT_EQ(choose_device(two, {.ranks = 2}, "--transport threads").note,
            "device: gpu (2x NVIDIA H200); --transport threads uses the CPU");
  const DeviceChoice shared = choose_device(make_gpus({"sm_90"}), {.ranks = 4, .ranks_per_gpu = 4});
  EXPECT_TRUE(shared.on_gpus);
  EXPECT_EQ(shared.note,
            "device: gpu (1x NVIDIA H200, shared by 4 ranks); --device cpu uses the CPU");
}

TEST(DeviceChoice, SaysNothingWithoutGpus) {
  const DeviceChoice choice = choose_device({}, {.ranks = 2, .cpu_only = "--codec-sweep"});
  EXPECT_FALSE(choice.on_gpus);
  EXPECT_EQ(choice.note, "");
}

TEST(DeviceChoice, SaysWhyGpusOfTheMachineAreNotThere) {
  Gpus gpus;
  gpus.missing = "this build has no CUDA";
  EXPECT_EQ(choose_device(gpus, {}).note, "device: cpu (this build has no CUDA)");
}

TEST(DeviceChoice, IsTheCpuForWhatGpusDoNotRun) {
  const Gpus one = make_gpus({"sm_90"});
  EXPECT_EQ(choose_device(one, {.ranks = 2}).note,
            "device: cpu (1x NVIDIA H200 not used: 2 ranks need a GPU each)");
  expect_cpu(one, {.ranks = 3, .ranks_per_gpu = 2}, "3 ranks, 2 a GPU");
  expect_cpu(one, {.one_host = false}, "several hosts: --device gpu");
  expect_cpu(one, {.cpu_only = "an emulated link"}, "not used: an emulated link)");
  expect_cpu(one, {.rank_bytes = 200e9}, "needs 186 GiB of a GPU, which has 140");
  EXPECT_TRUE(choose_device(one, {.rank_bytes = 140e9}).on_gpus);
  expect_cpu(one, {.ranks = 2, .ranks_per_gpu = 2, .rank_bytes = 100e9}, "needs 186 GiB");
}

TEST(DeviceChoice, UsesGpusOfSm90Only) {
  expect_cpu(make_gpus({"sm_75"}), {}, "GPU 0 is sm_75: expected sm_90");
  const Gpus mixed = make_gpus({"sm_90", "sm_80"});
  EXPECT_TRUE(choose_device(mixed, {.ranks = 1}).on_gpus);
  expect_cpu(mixed, {.ranks = 2}, "GPU 1 is sm_80: expected sm_90");
  EXPECT_TRUE(choose_device(mixed, {.ranks = 2, .ranks_per_gpu = 2}).on_gpus);
}

}  // namespace
}  // namespace tandem
