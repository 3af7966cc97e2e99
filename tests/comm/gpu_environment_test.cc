// Handling of variables that the user may have set, on GPU ranks. Needs neither CUDA nor NCCL.
#include "comm/device/gpu_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tandem/error.h"

namespace tandem::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::UnorderedElementsAre;

using Variables = std::map<std::string, std::string>;

Lookup lookup_in(const Variables& variables) {
  return [&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

TEST(GpuEnvironmentTest, SetsAllIfTheUserSetNone) {
  const Variables none;
  const GpuEnvironment made = gpu_environment(lookup_in(none));
  EXPECT_THAT(made.to_set,
              UnorderedElementsAre(Pair("NCCL_NVLS_ENABLE", "0"), Pair("NCCL_RUNTIME_CONNECT", "0"),
                                   Pair("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
                                   Pair("CUDA_MODULE_LOADING", "EAGER")));
  EXPECT_THAT(made.warnings, IsEmpty());
  EXPECT_TRUE(made.graphs);
}

TEST(GpuEnvironmentTest, KeepsTheUsersValuesAndReportsTheirCost) {
  const Variables users{{"NCCL_NVLS_ENABLE", "0"},
                        {"NCCL_RUNTIME_CONNECT", "1"},
                        {"CUDA_DEVICE_MAX_CONNECTIONS", "1"},
                        {"CUDA_MODULE_LOADING", "LAZY"}};
  const GpuEnvironment made = gpu_environment(lookup_in(users));
  EXPECT_THAT(made.to_set, IsEmpty());
  EXPECT_FALSE(made.graphs);
  EXPECT_THAT(
      made.warnings,
      ElementsAre(
          HasSubstr("CUDA_DEVICE_MAX_CONNECTIONS=1 is kept: Tandem would have set 32: streams"),
          HasSubstr("NCCL_RUNTIME_CONNECT=1 is kept: Tandem would have set 0: NCCL"),
          HasSubstr("CUDA_MODULE_LOADING=LAZY is kept: Tandem would have set EAGER: a kernel")));
}

TEST(GpuEnvironmentTest, IsSilentIfTheUsersValuesAreTheWantedOnes) {
  const Variables users{{"NCCL_NVLS_ENABLE", "0x0"},
                        {"NCCL_RUNTIME_CONNECT", "0"},
                        {"CUDA_DEVICE_MAX_CONNECTIONS", "64"},
                        {"CUDA_MODULE_LOADING", "EAGER"}};
  const GpuEnvironment made = gpu_environment(lookup_in(users));
  EXPECT_THAT(made.to_set, IsEmpty());
  EXPECT_THAT(made.warnings, IsEmpty());
  EXPECT_TRUE(made.graphs);
}

TEST(GpuEnvironmentTest, EmptyValueCountsAsUnset) {
  const Variables users{{"NCCL_NVLS_ENABLE", ""}, {"CUDA_DEVICE_MAX_CONNECTIONS", ""}};
  const GpuEnvironment made = gpu_environment(lookup_in(users));
  EXPECT_EQ(made.to_set.size(), 4u);
  EXPECT_TRUE(made.graphs);
  EXPECT_NO_THROW(refuse_multicast(lookup_in(users)));
}

TEST(GpuEnvironmentTest, MulticastIsRefusedByName) {
  for (const char* value : {"1", "2", "0x1", "-1"}) {
    const Variables users{{"NCCL_NVLS_ENABLE", value}};
    try {
      refuse_multicast(lookup_in(users));
      ADD_FAILURE() << value << " is taken";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()),
                "NCCL_NVLS_ENABLE=" + std::string(value) +
                    ": expected 0, or not set: NVLink multicast stays off");
    }
  }
  for (const char* value : {"0", "00", "0x0"}) {
    const Variables users{{"NCCL_NVLS_ENABLE", value}};
    EXPECT_NO_THROW(refuse_multicast(lookup_in(users))) << value;
  }
}

}  // namespace
}  // namespace tandem::test
