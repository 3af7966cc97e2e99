#include <dnnl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "comm/world/device_choice.h"
#include "comm/world/gpus.h"
#include "core/system/env.h"
#include "core/system/isa_level.h"
#include "core/system/machine.h"
#include "core/version.h"
#include "kernels/cuda/cudnn/attention.h"
#include "overlap/registry.h"
#include "tandem/communicator.h"

namespace tandem::cli {
namespace {

void line(std::string_view name, const std::string& value) {
  fmt::print("  {:<18} {}\n", name, value);
}

void variable(const char* name, const std::string& value, const char* meaning) {
  const char* set = std::getenv(name);
  fmt::print("  {:<19} {:<28} {} ({})\n", name, value, meaning, set && *set ? "set" : "default");
}

std::string options_text() {
  std::string text = fmt::format("{}, {}, {}{}", kBuildType, kCompiler,
                                 kNative ? "for this processor, " : "", kIsaLevel);
  return *kSanitizers ? text + ", sanitizers: " + kSanitizers : text;
}

void print_gpus(const Gpus& gpus) {
  line("GPUs", fmt::format("{}, {}, {:.0f} GiB each", gpus.describe(gpus.count), gpus.architecture,
                           gpus.memory_gib));
  std::vector<std::string> libraries;
  for (const auto& [name, version] : gpus.versions) {
    libraries.push_back(fmt::format("{} {}", name, version));
  }
  line("GPU libraries", fmt::format("{}", fmt::join(libraries, ", ")));
  line("cuDNN", gpu::describe_cudnn());
  const bool fused = gpus.architecture == "sm_90" && !env().gpu_portable;
  std::vector<std::string_view> names;
  for (const OperatorRow* row : operators()) {
    if (row->on_gpu) names.push_back(row->name);
  }
  line("GPU operators", fmt::format("{} and the collectives, {} fused kernels (sm_90)",
                                    fmt::join(names, " "), fused ? "with" : "without"));
}

void print_info() {
  const Machine machine = this_machine();
  const dnnl_version_t* dnnl = dnnl_version();
  fmt::print("tandem {} (commit {})\n\nBuild\n", kVersion, kCommit);
  line("options", options_text());
  line("oneDNN", fmt::format("{}.{}.{}", dnnl->major, dnnl->minor, dnnl->patch));
  fmt::print("\nTransports\n");
  line("threads", "ranks are threads of one process, with an emulated link on request (--link)");
  line("mpi", !*kMpiVersion ? "not in this build (configure with -DTANDEM_MPI=ON)"
              : launched_by_mpi()
                  ? fmt::format("{}; this process was started by mpirun", kMpiVersion)
                  : fmt::format("{}; used when started by mpirun", kMpiVersion));
  line("processes", "without MPI; used when started by torchrun or srun");
  const Gpus gpus = this_machines_gpus();
  line("nccl",
       gpus.count ? "ranks are GPUs of this machine (bench --transport nccl)" : gpus.missing);
  fmt::print("\nMachine\n");
  line("CPU", machine.describe());
  line("features", machine.features.empty() ? "none of those the kernels look for"
                                            : fmt::format("{}", fmt::join(machine.features, " ")));
  line("memory", fmt::format("{:.1f} GiB", double(machine.memory_bytes) / double(1ull << 30)));
  if (gpus.count) print_gpus(gpus);
  const bool on_gpus =
      env().device == "auto" ? choose_device(gpus, {}).on_gpus : env().device == "gpu";
  line("default device", on_gpus ? "gpu" : "cpu");
  fmt::print("\nEnvironment\n");
  variable("TANDEM_DEADLINE_S", fmt::format("{:g}", env().deadline_s),
           "seconds a wait lasts at most");
  variable("TANDEM_CACHE_DIR", env().cache_dir, "the tuner's cache");
  variable("TANDEM_TUNE", env().tune ? "1" : "0",
           "0: the first candidate where no times are known");
  variable("TANDEM_LOG", env().log_level, "trace, debug, info, warn or error");
  variable("TANDEM_THREADS", fmt::format("{}", env().threads),
           "CPU threads of one rank, 0: cores / ranks on this host");
  variable("TANDEM_MPI_SHM", env().mpi_shm ? "1" : "0", "1: ranks of one host share memory");
  variable("TANDEM_MPI_TRANSPORT", env().mpi_transport,
           "between hosts: tcp, mpi (MPI's messages) or auto (tcp unless MPI reaches a fabric)");
  variable("TANDEM_ALLOW_MIXED_BUILDS", env().allow_mixed_builds ? "1" : "0",
           "1 on all ranks: they may run different builds");
  variable("TANDEM_CHECK_MESSAGES", env().check_messages ? "1" : "0",
           "1: messages over sockets have a hash, which the receiver compares");
  variable("TANDEM_STRICT", env().strict ? "1" : "0",
           "1: operators that would not run as asked, overlapped, are refused, and say why");
  variable("TANDEM_LINK", env().link.empty() ? "not set" : env().link,
           "what mpi and processes call the network");
  variable("TANDEM_SNAPSHOT_MEMORY",
           env().snapshot_memory < 0 ? "not set" : fmt::format("{}", env().snapshot_memory),
           "file descriptor of memory that outlives ranks: tandem launch sets it");
  variable("TANDEM_DEVICE", env().device, "auto, cpu or gpu, for commands without --device");
  variable(
      "TANDEM_SNAPSHOT_TO_DISK", env().saves_snapshot ? "1" : "0",
      "1: train only writes the newest snapshot in that memory to disk: tandem launch sets it");
  variable("TANDEM_GPU_PORTABLE", env().gpu_portable ? "1" : "0",
           "1: no kernel that is for one GPU architecture");
  variable("TANDEM_GRAPHS", env().graphs ? "1" : "0",
           "1: operators on GPUs replay calls of many steps as CUDA graphs");
  variable("TANDEM_API_KEY", env().api_key.empty() ? "not set" : "not shown",
           "key that clients of tandem serve must give");
  variable("TANDEM_SECRET", env().secret.empty() ? "not set" : "not shown",
           "what ranks of several hosts prove to know, without MPI");
  variable("TANDEM_SECRET_FILE", env().secret_file.empty() ? "not set" : env().secret_file,
           "the file of mode 0600 that has it");
}

}  // namespace

void add_info(CLI::App& app) {
  app.add_subcommand("info", "Describe this build and this machine")->callback(print_info);
}

}  // namespace tandem::cli
