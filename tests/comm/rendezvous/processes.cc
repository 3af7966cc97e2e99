#include "tests/comm/rendezvous/processes.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <numeric>

#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "comm/rendezvous/endpoint.h"

namespace tandem::test {

Launch make_launch(int size, bool one_host) {
  static int worlds = 0;
  Launch launch;
  launch.size = size;
  launch.host = "127.0.0.1";
  launch.one_host = one_host;
  launch.world = std::to_string(getpid()) + " " + std::to_string(++worlds);
  launch.port = one_host ? 29500 : control::port_of(control::listen_on({"", "", 0}));
  return launch;
}

control::Secret secret_of(const Launch& launch) {
  if (launch.one_host) return {};
  return control::read_secret("of these tests, 16 bytes and more", "");
}

static int wrong(int rank, const std::exception& error) {
  std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
  return kWrong;
}

std::vector<pid_t> start(Launch launch, const std::vector<int>& present, double deadline_s,
                         const std::function<int(Communicator&)>& body) {
  std::vector<pid_t> children;
  for (const int rank : present) {
    const pid_t child = fork();
    if (child == 0) {
      int status = kWrong;
      launch.rank = launch.local_rank = rank;
      const int last = launch.size - 1;
      try {
        processes::Engine engine(std::make_unique<processes::RendezvousBootstrap>(
            launch, secret_of(launch), deadline_s));
        processes::run(engine, {.deadline_s = deadline_s},
                       [&](Communicator& comm) { status = body(comm); });
      } catch (const Timeout& error) {
        status = error.peer == last ? kTimeoutNamesIt : wrong(rank, error);
      } catch (const Aborted& error) {
        status = error.origin == last ? kAbortedNamesIt : wrong(rank, error);
      } catch (const Mismatch&) {
        status = kMismatch;
      } catch (const InvalidArgument&) {
        status = kRefused;
      } catch (const std::exception& error) {
        status = wrong(rank, error);
      }
      _exit(status);
    }
    children.push_back(child);
  }
  return children;
}

std::vector<int> finish(const std::vector<pid_t>& children) {
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return statuses;
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace tandem::test
