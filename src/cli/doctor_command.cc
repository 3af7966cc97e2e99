#include <fmt/format.h>

#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/doctor_world.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/printable.h"
#include "engine/report/diagnosis.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr int kMaxDoctorRanks = 1024;

void read_run(const std::string& out, const CLI::App& command) {
  if (command.count_all() > 2) {  // the command itself and OUT
    throw InvalidArgument(fmt::format(
        "doctor {}: expected no options with a run, which is read only", printable(out)));
  }
  now_doing("reading " + out);
  for (const std::string& line : report::diagnose(out)) fmt::print("{}\n", single_line(line));
}

}  // namespace

void add_doctor(CLI::App& app) {
  auto* command =
      app.add_subcommand("doctor", "Say what held a run back, or check hosts and links before one");
  auto out = std::make_shared<std::string>();
  auto options = std::make_shared<DoctorRequest>();
  command->add_option("out", *out,
                      "Folder of a run (--out of tandem train); without it, check hosts and links");
  command
      ->add_option("-n,--ranks", options->ranks,
                   "Ranks to start (default: one a GPU, 4 on CPUs, one on each host)")
      ->check(CLI::Range(1, kMaxDoctorRanks));
  command->add_option("--hosts", options->hosts, "File of hosts, as for tandem launch");
  command
      ->add_option("--remote-shell", options->remote_shell,
                   "Command that runs another on a host; the host's name and that command follow")
      ->capture_default_str();
  command
      ->add_option("--start-timeout", options->start_timeout_s, "Max seconds for a host to start")
      ->capture_default_str()
      ->check(CLI::Range(1e-3, 1e9));
  command
      ->add_option("--device", options->devices.device,
                   "Check CPUs or GPUs: products, memory and the links between them (default: GPUs "
                   "if there is one for each rank)")
      ->check(CLI::IsMember({"cpu", "gpu"}));
  command
      ->add_option("--factor", options->diagnosis.factor,
                   "Multiple of its kind's median from which a rank or link is slow")
      ->capture_default_str()
      ->check(CLI::Range(1.01, 1000.));
  command
      ->add_option("--seconds", options->diagnosis.machine.seconds,
                   "Min seconds of each rank's products of a data type, and of its copies")
      ->capture_default_str()
      ->check(CLI::Range(1e-3, 3600.));
  command
      ->add_option("--link-timeout", options->diagnosis.links.seconds,
                   "Max seconds for an answer over a link, else it is unreachable")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 1e6));
  command
      ->add_option("--inject", options->inject,
                   "Flip a bit, for tests: RANK:gemm, RANK:memory or RANK:message")
      ->option_text("RANK:WHERE");
  add_json_option(*command, options->output);
  command->add_flag("--rank-side", options->rank_side)->group("");
  command->footer(
      "\nWith OUT: reads OUT/ranks, in which every rank records the phases of its steps\n"
      "(trace.ranks); also while the run goes on. Prints where the time went, ranks whose own\n"
      "work takes longer than on the other ranks of their pipeline stage, operators that did\n"
      "not overlap and why (OUT/receipts.json, written at the end), how step times drifted, and\n"
      "what to try. If the run has a trace (trace.stream_mib, trace.enabled), also links whose\n"
      "messages take longer than those of other links of their axis.\n"
      "\nWithout: starts ranks here or on hosts, as tandem launch does, or checks the world of "
      "the\n"
      "launcher that has started it. Each rank multiplies matrices of integers, whose products "
      "are\n"
      "known bit for bit, writes patterns to memory and copies them; each pair of ranks exchanges\n"
      "known messages, then all at once. Prints a verdict for every host, rank and link: ok, "
      "slow,\n"
      "wrong bits or unreachable, and exits with 1 unless all are ok. With fewer than 3 ranks "
      "there\n"
      "is no median to compare with, so only bits count.\n"
      "\nExamples:\n"
      "  tandem doctor out/tiny\n"
      "  tandem doctor -n 2\n"
      "  tandem doctor --hosts hosts.txt --json doctor.json");
  command->callback(
      [command, out, options] { out->empty() ? run_doctor(*options) : read_run(*out, *command); });
}

}  // namespace tandem::cli
