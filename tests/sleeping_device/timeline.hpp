// When the device does what: the time line of a device that sleeps instead of computing.
//
// Times are computed, never measured. An operation begins at the latest of its launch by the host, the end of the
// operation before it on its stream, the end of what its stream was told to wait for, and, if it is a collective, the
// arrivals of the other ranks, which they post in a file that all of them map. So what the device did is known exactly,
// however late the scheduler of a busy machine is. Threads move the data, in the same order; what the host asks of the
// device (a query, a synchronization, a value) is answered when both the computed time and the data are there.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace sleeping {

inline std::atomic<int64_t> skipped_ns{0};

// CLOCK_MONOTONIC, which all processes of a host share, and what a test has skipped.
inline int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() + skipped_ns;
}

using Closure = std::function<void()>;

// Where the ranks of one communication post when they arrive: a number for each rank, 0 until it has arrived.
struct Meeting {
  std::atomic<int64_t>* arrivals = nullptr;
  int members = 0, self = 0;

  void post(int64_t arrival) const { arrivals[self].store(arrival, std::memory_order_release); }

  // The last arrival; nothing as long as somebody is missing.
  std::optional<int64_t> last() const {
    int64_t latest = 0;
    for (int i = 0; i < members; i++) {
      const int64_t arrival = arrivals[i].load(std::memory_order_acquire);
      if (!arrival) return std::nullopt;
      latest = std::max(latest, arrival);
    }
    return latest;
  }
};

// What an operation is, before it is put on a stream. `meet` makes the meetings of a communication when it is put
// there, which for one in a replayed graph is at each replay.
struct Task {
  std::string name;
  int64_t duration_ns = 0;
  Closure data;                // moves its data; null: none
  bool blocks = false;         // its data come from other processes, so that no host thread may move them
  std::function<std::vector<Meeting>()> meet;
};

struct Operation {
  std::string name;
  int64_t stream = 0, launch_ns = 0, duration_ns = 0;
  std::shared_ptr<Operation> before;              // on its stream
  std::vector<std::shared_ptr<Operation>> after;  // on others
  std::vector<Meeting> meetings;
  bool posted = false, timed = false;
  int64_t end_ns = 0;                                // once it is timed
  std::atomic<bool> moved{false};                    // its data have
};
using OperationPtr = std::shared_ptr<Operation>;

// What a stream was told while a graph was captured from it.
struct Captured {
  std::vector<Task> tasks;
  std::vector<int64_t> streams;  // that take part: the one it began on and those that joined it by events
  bool invalid = false;
};

struct Event {
  OperationPtr at;
  std::shared_ptr<Captured> graph;  // it was recorded in a capture, and never is over
};

// How a thread may call while another one captures a graph (cudaStreamCaptureMode).
enum CaptureMode : int { kGlobal, kThreadLocal, kRelaxed };
inline thread_local int capture_mode = kGlobal;
inline thread_local int64_t current_stream = 0;

// Of the log: an operation, or a wait of a stream for another one's event. `reached_ns`: when its stream got to it;
// `arrival_ns`: when it could have begun but for other ranks.
struct Row {
  std::string name;
  int64_t stream, launch_ns, reached_ns, arrival_ns, begin_ns, end_ns;
};

class Timeline {
 public:
  int64_t new_stream() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++streams_made_;
  }

  // Puts `task` on a stream, or into the graph that is being captured from it. `after`: what it waits for, too.
  OperationPtr put(int64_t stream, Task task, std::vector<OperationPtr> after = {}) {
    OperationPtr op;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (auto graph = capturing(stream)) {
        graph->tasks.push_back(std::move(task));
        return nullptr;
      }
      op = std::make_shared<Operation>();
      op->name = task.name;
      op->stream = stream;
      op->launch_ns = now_ns();
      op->duration_ns = static_cast<int64_t>(static_cast<double>(task.duration_ns) * slowness_);
      op->before = last_[stream];
      op->after = after;
      if (task.meet) op->meetings = task.meet();
      last_[stream] = op;
      untimed_.push_back(op);
      advance();
      if (!untimed_.empty()) start_ticking();
    }
    move(op, std::move(task), std::move(after));
    return op;
  }

  Event record(int64_t stream) {
    std::shared_ptr<Captured> graph;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      graph = capturing(stream);
    }
    if (graph) return {nullptr, graph};
    return {put(stream, {"event"}), nullptr};
  }

  // The stream waits for the event.
  void block(const Event& event, int64_t stream) {
    if (event.graph) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!capturing(stream) && !event.graph->tasks.empty() && is_open(event.graph))
        event.graph->streams.push_back(stream);
      return;
    }
    if (event.at) put(stream, {"wait"}, {event.at});
  }

  // Whether the device has come to it, in time and with its data (cudaEventQuery).
  bool over(const Event& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    refuse_in_capture(event);
    return over(event.at);
  }

  // Whether the device has done all that was put on the stream so far (cudaStreamQuery).
  bool over(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    refuse_in_capture();
    const auto found = last_.find(stream);
    return found == last_.end() || over(found->second);
  }

  double elapsed_ms(const Event& first, const Event& second) {
    std::lock_guard<std::mutex> lock(mutex_);
    refuse_in_capture(first);
    refuse_in_capture(second);
    advance();
    if (!first.at || !second.at) throw std::runtime_error("CUDA error: invalid resource handle");
    if (!first.at->timed || !second.at->timed) throw std::runtime_error("CUDA error: device not ready");
    // As CUDA tells it: in single precision.
    return static_cast<float>(static_cast<double>(second.at->end_ns - first.at->end_ns) / 1e6);
  }

  // The host waits until the operation is over and its data are there.
  void wait(const OperationPtr& op) {
    if (!op) return;
    const int64_t patience = now_ns() + int64_t{60'000'000'000};
    for (;;) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (over(op)) return;
      }
      if (now_ns() > patience) throw std::runtime_error("sleeping device: waited for a minute in vain for " + op->name);
      const int64_t left = op->timed ? op->end_ns - now_ns() : 0;
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::max<int64_t>(20'000, std::min<int64_t>(left, 5'000'000))));
    }
  }

  void wait_event(const Event& event) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      refuse_in_capture(event);
    }
    wait(event.at);
  }

  void wait_stream(int64_t stream) { wait(last_of(stream)); }

  void wait_all() {
    std::vector<OperationPtr> all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [stream, op] : last_) all.push_back(op);
    }
    for (const auto& op : all) wait(op);
  }

  // The stream's data are there, whatever its time is: for an operator whose results' sizes depend on them.
  void drain(int64_t stream) {
    const OperationPtr op = last_of(stream);
    if (!op) return;
    std::unique_lock<std::mutex> lock(data_mutex_);
    data_there_.wait(lock, [&] { return op->moved.load(); });
  }

  // Whether they are there, so that the host may move the next ones itself.
  bool drained(int64_t stream) {
    const OperationPtr op = last_of(stream);
    return !op || op->moved;
  }

  // --- graphs

  void begin_capture(int64_t stream, int mode) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (capturing(stream)) throw std::runtime_error("CUDA error: operation not permitted when stream is capturing");
    if (stream == 0) throw std::runtime_error("CUDA graphs must be captured on a non-default stream.");
    auto graph = std::make_shared<Captured>();
    graph->streams.push_back(stream);
    captures_.push_back({graph, mode, std::this_thread::get_id()});
  }

  std::shared_ptr<Captured> end_capture(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = captures_.begin(); at != captures_.end(); ++at) {
      if (at->graph->streams.front() != stream) continue;
      const auto graph = at->graph;
      captures_.erase(at);
      if (graph->invalid) throw std::runtime_error("CUDA error: operation failed due to a previous error during capture");
      return graph;
    }
    throw std::runtime_error("CUDA error: no capture has begun on this stream");
  }

  void replay(const Captured& graph, int64_t stream) {
    for (const Task& task : graph.tasks) put(stream, task);
  }

  bool is_capturing(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return capturing(stream) != nullptr;
  }

  // --- what a test sets and asks

  void slow_down(double factor) { slowness_ = factor; }

  std::vector<Row> log() {
    wait_all();
    std::lock_guard<std::mutex> lock(mutex_);
    return log_;
  }

 private:
  struct Capture {
    std::shared_ptr<Captured> graph;
    int mode;
    std::thread::id thread;
  };
  struct Worker {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::pair<OperationPtr, std::function<void()>>> queue;
  };

  // The same for whoever has the lock.
  bool over(const OperationPtr& op) {
    advance();
    return !op || (op->timed && op->moved && now_ns() >= op->end_ns);
  }

  OperationPtr last_of(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = last_.find(stream);
    return found == last_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Captured> capturing(int64_t stream) {
    for (const Capture& capture : captures_)
      for (const int64_t taking : capture.graph->streams)
        if (taking == stream) return capture.graph;
    return nullptr;
  }

  bool is_open(const std::shared_ptr<Captured>& graph) {
    for (const Capture& capture : captures_)
      if (capture.graph == graph) return true;
    return false;
  }

  void invalidate_all() {
    for (const Capture& capture : captures_) capture.graph->invalid = true;
  }

  // As CUDA does with calls that are unsafe while a graph is captured: the call fails, and so does the capture.
  void refuse_in_capture(const Event& event = {}) {
    bool refused = event.graph != nullptr;
    for (const Capture& capture : captures_) {
      const bool own = capture.thread == std::this_thread::get_id();
      refused |= capture_mode == kGlobal && (capture.mode == kGlobal || (capture.mode == kThreadLocal && own));
      refused |= capture_mode == kThreadLocal && own && capture.mode != kRelaxed;
    }
    if (!refused) return;
    invalidate_all();
    throw std::runtime_error("CUDA error: operation not permitted when stream is capturing");
  }

  // Times all operations that can be timed by now. They stand in the order of their issue, and none waits for a later one.
  void advance() {
    std::deque<OperationPtr> left;
    for (const OperationPtr& op : untimed_) {
      bool ready = !op->before || op->before->timed;
      const int64_t reached = std::max(op->launch_ns, op->before ? op->before->end_ns : 0);
      int64_t arrival = reached;
      for (const auto& before : op->after) {
        ready &= before->timed;
        arrival = std::max(arrival, before->end_ns);
      }
      int64_t begin = arrival;
      if (ready) {
        for (const Meeting& meeting : op->meetings) {
          if (!op->posted) meeting.post(arrival);
          const auto last = meeting.last();
          ready &= last.has_value();
          if (last) begin = std::max(begin, *last);
        }
        op->posted = true;
      }
      if (!ready) {
        left.push_back(op);
        continue;
      }
      op->end_ns = begin + op->duration_ns;
      op->timed = true;
      op->before = nullptr;
      op->after.clear();
      if (op->name != "event")
        log_.push_back({op->name, op->stream, op->launch_ns, reached, arrival, begin, op->end_ns});
    }
    untimed_.swap(left);
  }

  // An arrival is posted when it can be computed, whatever the host does meanwhile: others may be waiting for it.
  void start_ticking() {
    if (std::exchange(ticking_, true)) return;
    std::thread([this] {
      for (;;) {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        std::lock_guard<std::mutex> lock(mutex_);
        if (!untimed_.empty()) advance();
      }
    }).detach();
  }

  // Moves the data of an operation, after those of the operations before it: at once if they are there and no other
  // process is needed, else on the stream's thread.
  void move(const OperationPtr& op, Task task, std::vector<OperationPtr> after) {
    Worker& worker = worker_of(op->stream);
    {
      std::unique_lock<std::mutex> lock(worker.mutex);
      bool now = !task.blocks && worker.queue.empty();
      for (const auto& before : after) now &= before->moved;
      if (!now) {
        worker.queue.emplace_back(op, [this, task = std::move(task), after = std::move(after)] {
          for (const auto& before : after) {
            std::unique_lock<std::mutex> waiting(data_mutex_);
            data_there_.wait(waiting, [&] { return before->moved.load(); });
          }
          if (task.data) task.data();
        });
        worker.wake.notify_one();
        return;
      }
      if (task.data) task.data();  // under the lock, so that nothing of this stream comes in between
    }
    set_moved(op);
  }

  void set_moved(const OperationPtr& op) {
    std::lock_guard<std::mutex> lock(data_mutex_);
    op->moved = true;
    data_there_.notify_all();
  }

  Worker& worker_of(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& worker = workers_[stream];
    if (!worker) {
      worker = std::make_unique<Worker>();
      std::thread([this, worker = worker.get()] { work(*worker); }).detach();
    }
    return *worker;
  }

  void work(Worker& worker) {
    for (;;) {
      std::unique_lock<std::mutex> lock(worker.mutex);
      worker.wake.wait(lock, [&] { return !worker.queue.empty(); });
      auto [op, data] = worker.queue.front();
      lock.unlock();
      try {
        data();
      } catch (const std::exception& error) {
        fprintf(stderr, "sleeping device: %s failed: %s\n", op->name.c_str(), error.what());
      }
      lock.lock();
      worker.queue.pop_front();  // only now, so that nothing is moved beside it
      lock.unlock();
      set_moved(op);
    }
  }

  std::mutex mutex_;
  int64_t streams_made_ = 0;
  double slowness_ = 1;
  bool ticking_ = false;
  std::map<int64_t, OperationPtr> last_;
  std::deque<OperationPtr> untimed_;
  std::vector<Row> log_;
  std::vector<Capture> captures_;
  std::map<int64_t, std::unique_ptr<Worker>> workers_;
  std::mutex data_mutex_;
  std::condition_variable data_there_;
};

// Never destroyed: its threads go on until the process ends.
Timeline& timeline();

// How often the device was asked what: record, query, elapsed, block, synchronize, recordDataPtrOnStream.
void count(const char* what);
std::map<std::string, int64_t> counts();

}  // namespace sleeping
