// Per-block expert counts for an unmodified libllama.
//
// libllama calls two of its own functions through its symbol table: the long form of
// llm_graph_context::build_moe_ffn, which builds the routed experts of one block, and
// llama_hparams::n_expert_used, which that function asks how many expert outputs to add up. A library that
// comes first in the symbol search and defines both decides how many experts the block consults: it replaces the
// argument of the first, answers the second with the same number, and leaves the work to the originals.
//
// Two ways in:
//   in process   dlopen this file with RTLD_GLOBAL before libllama, then routing_lab_bind and routing_lab_set;
//   LD_PRELOAD   with ROUTING_LAB_EXPERTS="0-6:6,7-32:5" in the environment (block or block range : experts), or with
//                --override-kv routing_lab.experts_used=str:0-6:6/7-32:5 on the command line.
//
// The command line is for programs that start several servers with one environment, as llama-server's router does.
// llama.cpp keeps a metadata override that no model asks for and never looks at it. A text value has at most 127 bytes
// there, so a long schedule comes in parts, routing_lab.experts_used.1of3 and so on; "own" is the model's own counts.
// Where environment and command line contradict each other the program does not start.
//
// The schedule is one per process and is read when a graph is built. llama.cpp reuses graphs, so a change takes
// effect in a context that is created after it; set it before each build when several contexts are alive.
//
// Under LD_PRELOAD two more variables work, and a report is kept:
//   ROUTING_LAB_CONTROL  path of a file that switches the schedule of the running program, wherever that came from; it
//                        is looked at when a graph begins. It must appear whole (write another file, then rename it):
//                            routing_lab control 1
//                            generation 5                 above the last one
//                            experts 0-6:6,7-32:5         or: own
//                            end
//                        What cannot be read is refused with a line on standard error, and the schedule stays.
//   ROUTING_LAB_WATCH    number of an inherited descriptor; the program ends when its other end closes, or when its
//                        parent is gone. With ",parent" behind it the kernel ends it with the thread that started it,
//                        also where it is stopped and could not watch anything.
//   the report           an anonymous file of the process, /proc/PID/fd/N -> "/memfd:routing_lab_report", which says
//                        for each block what its last graph was built with; see report_text.
//
// Signatures are those of llama.cpp from September to October 2026 on Linux x86-64 and aarch64. Only their mangled
// names and their calling convention matter, so forward declarations replace llama.cpp's headers.

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define EXPORTED __attribute__((visibility("default")))

struct ggml_tensor;
enum llm_ffn_op_type : int;
enum llama_expert_gating_func_type : int;

struct EXPORTED llama_hparams {
    uint32_t n_expert_used(uint32_t il) const;
};

struct EXPORTED llm_graph_context {
    ggml_tensor * build_moe_ffn(
        ggml_tensor * cur, ggml_tensor * gate_inp, ggml_tensor * gate_inp_b, ggml_tensor * up_exps,
        ggml_tensor * up_exps_b, ggml_tensor * gate_exps, ggml_tensor * gate_exps_b, ggml_tensor * down_exps,
        ggml_tensor * down_exps_b, ggml_tensor * exp_probs_b, int64_t n_expert, int64_t n_expert_used,
        llm_ffn_op_type type_op, bool norm_w, float w_scale, llama_expert_gating_func_type gating_op, int il,
        ggml_tensor * probs_in, ggml_tensor * gate_up_exps, ggml_tensor * gate_up_exps_b, ggml_tensor * up_exps_s,
        ggml_tensor * gate_exps_s, ggml_tensor * down_exps_s, ggml_tensor * selected_experts_in) const;
};

namespace {

constexpr const char * ENVIRONMENT = "ROUTING_LAB_EXPERTS";
constexpr const char * CONTROL_ENVIRONMENT = "ROUTING_LAB_CONTROL";
constexpr const char * WATCH_ENVIRONMENT = "ROUTING_LAB_WATCH";
constexpr const char * ARGUMENT = "--override-kv";
constexpr const char * KEY_FAMILY = "routing_lab."; // a key of it that is not ours is a typing error
constexpr const char * KEY = "routing_lab.experts_used";
constexpr const char * OWN = "own"; // the model's own counts
constexpr const char * REPORT_NAME = "routing_lab_report";
constexpr const char * WITH_PARENT = ",parent";
constexpr int WATCH_MS = 1000;               // how soon a new parent is noticed where the descriptor stays open
constexpr size_t CONTROL_BYTES = 64 * 1024;  // a schedule of BLOCK_LIMIT single blocks takes 48 KiB
constexpr int EXIT_UNSUPPORTED = 4; // the exit code of the whole product for "the runtime cannot do this"
constexpr uint32_t BLOCK_LIMIT = 4096; // far above llama.cpp's own limit; keeps a typing error from taking gigabytes

constexpr const char * BUILD_MOE_FFN =
    "_ZNK17llm_graph_context13build_moe_ffnEP11ggml_tensorS1_S1_S1_S1_S1_S1_S1_S1_S1_ll15llm_ffn_op_typebf"
    "29llama_expert_gating_func_typeiS1_S1_S1_S1_S1_S1_S1_";
constexpr const char * N_EXPERT_USED = "_ZNK13llama_hparams13n_expert_usedEj";

// A member function is called like a free one that takes `this` first (Itanium C++ ABI, both architectures).
using BuildMoeFfn = ggml_tensor * (*)(
    const llm_graph_context *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *,
    ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, int64_t, int64_t, llm_ffn_op_type, bool,
    float, llama_expert_gating_func_type, int, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *,
    ggml_tensor *, ggml_tensor *, ggml_tensor *);
using NExpertUsed = uint32_t (*)(const llama_hparams *, uint32_t);
using Rows = int64_t (*)(const ggml_tensor *);

[[noreturn]] void refuse(const std::string & why) {
    std::fprintf(stderr, "routing_lab: %s\n", why.c_str());
    std::_Exit(EXIT_UNSUPPORTED);
}

// ---- the schedule ---------------------------------------------------------------------------------------------------

struct Schedule {
    std::string text;
    std::vector<uint32_t> experts; // by block; 0: not listed, the model's own count stays

    uint32_t of(int block) const {
        return block >= 0 && static_cast<size_t>(block) < experts.size() ? experts[static_cast<size_t>(block)] : 0;
    }
};

// Reads digits at `at` and moves behind them.
uint32_t parse_number(const std::string & text, size_t & at) {
    const size_t from = at;
    uint64_t value = 0;
    while (at < text.size() && text[at] >= '0' && text[at] <= '9' && at - from < 9) {
        value = value * 10 + static_cast<uint64_t>(text[at++] - '0');
    }
    if (at == from) {
        throw std::invalid_argument("a number is expected at position " + std::to_string(from + 1));
    }
    return static_cast<uint32_t>(value);
}

void expect(const std::string & text, size_t & at, char wanted) {
    if (at >= text.size() || text[at] != wanted) {
        throw std::invalid_argument(std::string("'") + wanted + "' is expected at position " + std::to_string(at + 1));
    }
    ++at;
}

// One entry, "7:5" or "7-32:5".
void parse_entry(const std::string & text, size_t & at, std::vector<uint32_t> & experts) {
    const uint32_t first = parse_number(text, at);
    uint32_t last = first;
    if (at < text.size() && text[at] == '-') {
        last = parse_number(text, ++at);
    }
    expect(text, at, ':');
    const uint32_t count = parse_number(text, at);
    if (last < first || last >= BLOCK_LIMIT) {
        throw std::invalid_argument("block range " + std::to_string(first) + "-" + std::to_string(last) + " is impossible");
    }
    if (count == 0) {
        throw std::invalid_argument("block " + std::to_string(first) + " cannot consult 0 experts");
    }
    experts.resize(std::max<size_t>(experts.size(), last + 1));
    for (uint32_t block = first; block <= last; ++block) {
        if (experts[block] != 0) {
            throw std::invalid_argument("block " + std::to_string(block) + " is given twice");
        }
        experts[block] = count;
    }
}

std::shared_ptr<const Schedule> parse_schedule(const std::string & text) {
    auto schedule = std::make_shared<Schedule>();
    schedule->text = text;
    try {
        for (size_t at = 0; at < text.size() || at == 0;) {
            parse_entry(text, at, schedule->experts);
            if (at < text.size()) {
                expect(text, at, ',');
                if (at == text.size()) {
                    throw std::invalid_argument("an entry is expected after the last ','");
                }
            }
        }
    } catch (const std::invalid_argument & problem) {
        throw std::invalid_argument("bad expert counts \"" + text + "\": " + problem.what() +
                                    "; the form is \"0-6:6,7-32:5\" (blocks:experts)");
    }
    return schedule;
}

// Null is the model's own counts.
std::string schedule_text(const std::shared_ptr<const Schedule> & schedule) { return schedule ? schedule->text : OWN; }

// ---- the command line ----------------------------------------------------------------------------------------------

struct Descriptor {
    const int number;
    explicit Descriptor(int opened) : number(opened) {}
    ~Descriptor() { close(number); }
    Descriptor(const Descriptor &) = delete;
    Descriptor & operator=(const Descriptor &) = delete;
};

std::vector<std::string> command_line() {
    const Descriptor file(open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC));
    std::string text;
    char piece[4096];
    for (ssize_t got; (got = read(file.number, piece, sizeof piece)) > 0;) {
        text.append(piece, static_cast<size_t>(got));
    }
    std::vector<std::string> words;
    for (size_t at = 0; at < text.size(); at += words.back().size() + 1) {
        words.emplace_back(text.c_str() + at);
    }
    return words;
}

// The fields of one CSV row as llama.cpp splits them (common/arg.cpp): a quote opens a field only at its start.
std::vector<std::string> split_row(const std::string & text) {
    std::vector<std::string> fields(1);
    bool quoted = false;
    for (size_t at = 0; at < text.size(); ++at) {
        std::string & field = fields.back();
        if (text[at] == '"' && !quoted && field.empty()) {
            quoted = true;
        } else if (text[at] == '"' && quoted && at + 1 < text.size() && text[at + 1] == '"') {
            field += text[at++];
        } else if (text[at] == '"' && quoted) {
            quoted = false;
        } else if (text[at] == ',' && !quoted) {
            fields.emplace_back();
        } else {
            field += text[at];
        }
    }
    return fields;
}

// A schedule on the command line, by the number of the part.
struct Parts {
    uint32_t of = 0;
    std::map<uint32_t, std::string> texts;
};

// Takes one metadata override where it is a part of the schedule.
void take_override(const std::string & text, Parts & parts) {
    const size_t equals = std::min(text.find('='), text.size());
    const std::string key = text.substr(0, equals);
    if (key.compare(0, std::strlen(KEY_FAMILY), KEY_FAMILY) != 0) {
        return;
    }
    uint32_t part = 1, of = 1;
    size_t at = std::strlen(KEY);
    if (key.compare(0, at, KEY) == 0 && at < key.size()) {
        expect(key, at, '.');
        part = parse_number(key, at);
        expect(key, at, 'o');
        expect(key, at, 'f');
        of = parse_number(key, at);
    }
    if (at != key.size() || key.compare(0, std::strlen(KEY), KEY) != 0 || part < 1 || part > of) {
        throw std::invalid_argument("\"" + key + "\" is no key of this library");
    }
    if (text.compare(equals, 5, "=str:") != 0) {
        throw std::invalid_argument("\"" + key + "\" must be of type str");
    }
    if ((parts.of != 0 && parts.of != of) || !parts.texts.emplace(part, text.substr(equals + 5)).second) {
        throw std::invalid_argument("the schedule is given twice, at \"" + key + "\"");
    }
    parts.of = of;
}

// The schedule that the command line names, in the form of the environment; empty: none.
std::string schedule_argument(const std::vector<std::string> & words) {
    Parts parts;
    for (size_t at = 0; at + 1 < words.size(); ++at) {
        std::string option = words[at];
        std::replace(option.begin(), option.end(), '_', '-'); // as llama.cpp reads it
        if (option == ARGUMENT) {
            for (const std::string & field : split_row(words[++at])) {
                take_override(field, parts);
            }
        }
    }
    if (parts.texts.size() != parts.of) {
        throw std::invalid_argument("the schedule has " + std::to_string(parts.texts.size()) + " of its " +
                                    std::to_string(parts.of) + " parts");
    }
    std::string text;
    for (const auto & [part, piece] : parts.texts) {
        text += (text.empty() ? "" : ",") + piece;
        if (piece.empty()) {
            throw std::invalid_argument("part " + std::to_string(part) + " of the schedule is empty");
        }
    }
    std::replace(text.begin(), text.end(), '/', ','); // a comma would end the override for llama.cpp
    return text;
}

// ---- what the process knows -----------------------------------------------------------------------------------------

struct Built {
    int64_t asked;    // the count that libllama wanted
    int64_t selected; // the count it was given
    int64_t summed;   // the length of the sum, or -1 when libllama did not ask for it through its symbol table
};

// One row of the report.
struct Reported {
    Built built;
    uint64_t generation; // of the schedule it was built under

    bool operator==(const Reported & other) const {
        return built.asked == other.built.asked && built.selected == other.built.selected &&
               built.summed == other.built.summed && generation == other.generation;
    }
};

struct Report {
    std::map<std::pair<int, bool>, Reported> rows; // by block and whether the graph is one for a single token
    int descriptor = -1;
    bool impossible = false;
    uint64_t sequence = 0;
};

struct Control {
    std::string path; // empty: there is none
    struct stat seen = {};
    uint64_t generation = 0; // 0: the schedule that the program was started with
    std::string refused;     // why the last file was not taken; empty when it was
};

struct State {
    std::mutex mutex;
    std::shared_ptr<const Schedule> schedule; // null: every block keeps the model's own count
    std::map<int, Built> built;               // by block, since the last reset
    std::map<int, int64_t> experts;           // by block, how many there are
    bool announce = false;                    // say once that the schedule of the start is in use
    bool by_command_line = false;             // the program was started with a schedule of its own
    const char * source = "nothing";          // where the schedule comes from, in the words of the report
    bool bound = false;                       // a program drives this library; neither control file nor report
    Control control;
    Report report;
    std::atomic<BuildMoeFfn> build_moe_ffn{nullptr};
    std::atomic<NExpertUsed> n_expert_used{nullptr};
    std::atomic<Rows> rows_of{nullptr};
};

State & state() {
    static State * const leaked = new State; // never destroyed: graphs may be built while the process ends
    return *leaked;
}

// The block whose experts this thread is building. n_expert_used answers with the schedule only in here, because
// loading derives tensor shapes from the same function.
struct Building {
    int block;
    uint32_t count; // 0: observe only
    int64_t summed;
};

thread_local Building * building = nullptr;

// What the model itself last answered on this thread. Every graph but a warm-up asks before its first block.
thread_local uint32_t own_count = 0;

struct Scope {
    Building * const outer = building;
    explicit Scope(Building & inner) { building = &inner; }
    ~Scope() { building = outer; }
    Scope(const Scope &) = delete;
    Scope & operator=(const Scope &) = delete;
};

// ---- the originals --------------------------------------------------------------------------------------------------

bool resolve_from(void * handle) {
    void * const build = dlsym(handle, BUILD_MOE_FFN);
    void * const used = dlsym(handle, N_EXPERT_USED);
    Dl_info self, found;
    // A search that ends in this library again found no original.
    if (!build || !used || !dladdr(reinterpret_cast<void *>(&resolve_from), &self) || !dladdr(build, &found) ||
        self.dli_fbase == found.dli_fbase) {
        return false;
    }
    // A dependency of libllama, which a search through its handle reaches; without it the report has no rows.
    state().rows_of = reinterpret_cast<Rows>(dlsym(handle, "ggml_nrows"));
    state().n_expert_used = reinterpret_cast<NExpertUsed>(used);
    state().build_moe_ffn = reinterpret_cast<BuildMoeFfn>(build);
    return true;
}

// Without a bind the original lies behind this library in the search order, or, where a program loaded libllama
// privately as Python does, in the library that the call came from.
void resolve_for(void * caller) {
    if (resolve_from(RTLD_NEXT)) {
        return;
    }
    Dl_info info;
    if (dladdr(caller, &info) && info.dli_fname) {
        if (void * const handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
            const bool found = resolve_from(handle);
            dlclose(handle);
            if (found) {
                return;
            }
        }
    }
    refuse("the libllama of this process does not have both functions that the expert override replaces");
}

BuildMoeFfn original_build_moe_ffn(void * caller) {
    if (!state().build_moe_ffn) {
        resolve_for(caller);
    }
    return state().build_moe_ffn;
}

NExpertUsed original_n_expert_used(void * caller) {
    if (!state().n_expert_used) {
        resolve_for(caller);
    }
    return state().n_expert_used;
}

// ---- the control file -----------------------------------------------------------------------------------------------

struct Order {
    uint64_t generation;
    std::shared_ptr<const Schedule> schedule;
};

// The rest of the line that starts with `key` at `at`; moves behind its end.
std::string take_line(const std::string & text, size_t & at, const std::string & key) {
    const size_t end = text.find('\n', at);
    if (end == std::string::npos || text.compare(at, key.size(), key) != 0) {
        throw std::invalid_argument("the line '" + key + "' is missing or not whole");
    }
    const std::string rest = text.substr(at + key.size(), end - at - key.size());
    at = end + 1;
    return rest;
}

Order parse_control(const std::string & text) {
    size_t at = 0;
    if (take_line(text, at, "routing_lab control ") != "1") {
        throw std::invalid_argument("it is not of version 1");
    }
    const std::string number = take_line(text, at, "generation ");
    if (number.empty() || number.size() > 18 || number.find_first_not_of("0123456789") != std::string::npos) {
        throw std::invalid_argument("its generation is no number");
    }
    const std::string experts = take_line(text, at, "experts ");
    if (!take_line(text, at, "end").empty() || at != text.size()) {
        throw std::invalid_argument("it does not stop after the line 'end'");
    }
    return Order{std::stoull(number), experts == OWN ? nullptr : parse_schedule(experts)};
}

// Reads the whole file and sets `seen` to what was read.
std::string read_control(const std::string & path, struct stat & seen) {
    const int opened = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (opened < 0) {
        throw std::invalid_argument(std::string("it cannot be opened: ") + std::strerror(errno));
    }
    const Descriptor file(opened);
    if (fstat(file.number, &seen) != 0 || !S_ISREG(seen.st_mode)) {
        throw std::invalid_argument("it is no regular file");
    }
    if (seen.st_uid != geteuid()) {
        throw std::invalid_argument("it belongs to another user");
    }
    std::string text(CONTROL_BYTES + 1, '\0');
    size_t size = 0;
    for (ssize_t got = 1; got > 0 && size < text.size(); size += static_cast<size_t>(std::max<ssize_t>(got, 0))) {
        got = read(file.number, &text[size], text.size() - size);
    }
    if (size > CONTROL_BYTES) {
        throw std::invalid_argument("it has more than " + std::to_string(CONTROL_BYTES) + " bytes");
    }
    text.resize(size);
    return text;
}

// Throws where the order must not be followed. What a block has is known from the graphs built so far; the first ones
// are built when the program makes its context, before it decodes anything.
void check_order(const Order & order) {
    if (order.generation <= state().control.generation) {
        throw std::invalid_argument("its generation " + std::to_string(order.generation) + " is not above " +
                                    std::to_string(state().control.generation) + ", which is in force");
    }
    for (const auto & [block, experts] : state().experts) {
        if (order.schedule && order.schedule->of(block) > experts) {
            throw std::invalid_argument("block " + std::to_string(block) + " should consult " +
                                        std::to_string(order.schedule->of(block)) + " experts and has " +
                                        std::to_string(experts));
        }
    }
}

bool same_file(const struct stat & a, const struct stat & b) {
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_size == b.st_size &&
           a.st_mtim.tv_sec == b.st_mtim.tv_sec && a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
}

// One line of at most 300 plain characters, whatever a file made of it.
std::string plain_line(std::string text) {
    if (text.size() > 300) {
        text = text.substr(0, 297) + "...";
    }
    for (char & letter : text) {
        letter = letter < ' ' || letter > '~' ? '?' : letter;
    }
    return text;
}

void publish();

// Takes a new control file. One `stat` where nothing changed. The lock is held.
void follow_control() {
    Control & control = state().control;
    struct stat now = {};
    if (control.path.empty() || state().bound || lstat(control.path.c_str(), &now) != 0 ||
        same_file(now, control.seen)) {
        return;
    }
    control.seen = now;
    try {
        const Order order = parse_control(read_control(control.path, control.seen));
        check_order(order);
        state().schedule = order.schedule;
        state().announce = false;
        state().source = "control file";
        control.generation = order.generation;
        control.refused.clear();
        if (state().by_command_line) { // a router's servers share one control file, so this may be meant for another
            std::fprintf(stderr, "routing_lab: the control file %s takes the place of the command line: %s\n",
                         control.path.c_str(), schedule_text(order.schedule).c_str());
        }
    } catch (const std::invalid_argument & problem) {
        control.refused = plain_line(problem.what());
        std::fprintf(stderr, "routing_lab: the control file %s is refused, the schedule stays: %s\n",
                     control.path.c_str(), control.refused.c_str());
    }
    publish();
}

// The schedule of the graph that this thread is building: one graph never gets two.
struct Graph {
    const void * context = nullptr;
    int last_block = -1;
    std::shared_ptr<const Schedule> schedule;
    uint64_t generation = 0;
    int64_t tokens = 0; // 0: not known
};

thread_local Graph graph;

// A graph begins with another context, or where the blocks do not go on rising. Its first block has a row of
// activations for each token; the last one may have rows only for the tokens whose logits are wanted.
void enter_block(const void * context, int block, int64_t rows) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const bool begins = context != graph.context || block <= graph.last_block;
    if (begins) {
        follow_control();
        graph.tokens = rows;
    }
    // A program that drives this library may set another schedule at any time.
    if (begins || state().bound) {
        graph.schedule = state().schedule;
        graph.generation = state().control.generation;
    }
    graph.context = context;
    graph.last_block = block;
}

// ---- the report -----------------------------------------------------------------------------------------------------

// Lines of words:
//     routing_lab report 1
//     sequence 17                                          of this text
//     generation 5                                         of the schedule for the next graph; 0: the one of the start
//     experts 0-6:6,7-32:5                                 that schedule, or: own
//     source control file                                  or: environment, command line, nothing
//     refused its generation 4 is not above 5              only where the last control file was refused
//     decode BLOCK ASKED SELECTED SUMMED GENERATION        the last graph for a single token
//     batch BLOCK ASKED SELECTED SUMMED GENERATION         the last graph for more
//     end 17                                               the sequence again: the text is whole
std::string report_text() {
    const Report & report = state().report;
    const Control & control = state().control;
    const std::string sequence = std::to_string(report.sequence);
    std::string text = "routing_lab report 1\nsequence " + sequence + "\ngeneration " +
                       std::to_string(control.generation) + "\nexperts " +
                       schedule_text(state().schedule) + "\nsource " + state().source + '\n';
    if (!control.refused.empty()) {
        text += "refused " + control.refused + '\n';
    }
    for (const auto & [key, row] : report.rows) {
        text += std::string(key.second ? "decode " : "batch ") + std::to_string(key.first) + ' ' +
                std::to_string(row.built.asked) + ' ' + std::to_string(row.built.selected) + ' ' +
                std::to_string(row.built.summed) + ' ' + std::to_string(row.generation) + '\n';
    }
    return text + "end " + sequence + '\n';
}

// Renews the report. The lock is held.
void publish() {
    Report & report = state().report;
    if (state().bound || report.impossible) {
        return;
    }
    if (report.descriptor < 0) {
        report.descriptor = static_cast<int>(syscall(SYS_memfd_create, REPORT_NAME, 1U /* MFD_CLOEXEC */));
    }
    ++report.sequence;
    const std::string text = report_text();
    const auto size = static_cast<ssize_t>(text.size());
    if (report.descriptor < 0 || pwrite(report.descriptor, text.data(), text.size(), 0) != size ||
        ftruncate(report.descriptor, size) != 0) {
        report.impossible = true;
        std::fprintf(stderr, "routing_lab: there will be no report: %s\n", std::strerror(errno));
    }
}

// ---- the decision ---------------------------------------------------------------------------------------------------

// A warm-up graph wants every expert so that all weights are read once; it computes nothing that is used.
bool is_warm_up(int64_t n_expert, int64_t asked) {
    return asked == n_expert && own_count != static_cast<uint32_t>(n_expert);
}

// How many experts the block gets instead of `asked`; 0: leave it alone.
uint32_t substitute(const Schedule * schedule, int block, int64_t n_expert, int64_t asked, bool chosen_elsewhere) {
    const uint32_t count = schedule ? schedule->of(block) : 0;
    if (count == 0 || is_warm_up(n_expert, asked) || chosen_elsewhere) {
        return 0;
    }
    if (count > n_expert) {
        refuse("block " + std::to_string(block) + " should consult " + std::to_string(count) + " experts and has " +
               std::to_string(n_expert));
    }
    return count;
}

void announce_once() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (state().announce) {
        state().announce = false;
        std::fprintf(stderr, "routing_lab: experts per block %s\n", state().schedule->text.c_str());
    }
}

void record(int block, const Built & built, int64_t n_expert) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().built[block] = built;
    state().experts[block] = n_expert;
    if (graph.tokens == 0 || is_warm_up(n_expert, built.asked)) {
        return;
    }
    const Reported row{built, graph.generation};
    const auto [place, is_new] = state().report.rows.try_emplace({block, graph.tokens == 1}, row);
    // Most graphs repeat what an earlier one said, and then nothing is written.
    if (is_new || !(place->second == row)) {
        place->second = row;
        publish();
    }
}

void copy_text(const std::string & text, char * buffer, size_t size) {
    if (size > 0) {
        const size_t length = text.size() < size ? text.size() : size - 1;
        std::memcpy(buffer, text.data(), length);
        buffer[length] = '\0';
    }
}

// Ends the process when the other end of `watched` closes, or when the process gets another parent.
void * watch(void * watched) {
    struct pollfd line = {static_cast<int>(reinterpret_cast<intptr_t>(watched)), POLLIN, 0};
    const pid_t parent = getppid();
    while (getppid() == parent) {
        char unread[64];
        if (poll(&line, 1, WATCH_MS) <= 0) {
            continue;
        }
        if (line.revents & POLLNVAL) {
            return nullptr;
        }
        if (read(line.fd, unread, sizeof unread) == 0) {
            break;
        }
    }
    std::_Exit(0);
}

void start_watching(const char * text) {
    char * end = nullptr;
    const long watched = std::strtol(text, &end, 10);
    if (end != text && std::strcmp(end, WITH_PARENT) == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        end += std::strlen(WITH_PARENT);
    }
    if (end == text || *end != '\0' || watched < 0 || fcntl(static_cast<int>(watched), F_SETFD, FD_CLOEXEC) != 0) {
        refuse(std::string(WATCH_ENVIRONMENT) + " names no open descriptor");
    }
    unsetenv(WATCH_ENVIRONMENT); // a program started from here has no such descriptor
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are for the program's own threads
    pthread_t thread;
    if (pthread_create(&thread, nullptr, watch, reinterpret_cast<void *>(static_cast<intptr_t>(watched))) != 0) {
        refuse("the thread that watches the parent cannot be started");
    }
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// A schedule that the program was started with.
struct Given {
    bool is = false;
    std::shared_ptr<const Schedule> schedule;
};

Given given_by_environment() {
    const char * const text = std::getenv(ENVIRONMENT);
    try {
        return text ? Given{true, parse_schedule(text)} : Given{};
    } catch (const std::invalid_argument & problem) {
        refuse(std::string(ENVIRONMENT) + ": " + problem.what());
    }
}

Given given_by_command_line() {
    try {
        const std::string text = schedule_argument(command_line());
        return text.empty() ? Given{} : Given{true, text == OWN ? nullptr : parse_schedule(text)};
    } catch (const std::invalid_argument & problem) {
        refuse(std::string(ARGUMENT) + ": " + plain_line(problem.what()));
    }
}

bool same_counts(const Given & a, const Given & b) {
    return a.schedule && b.schedule ? a.schedule->experts == b.schedule->experts : a.schedule == b.schedule;
}

// Under LD_PRELOAD the schedule comes with the environment or the command line. A server that cannot honour it must not
// start: it would answer with other counts than its operator believes.
__attribute__((constructor)) void read_start() {
    if (const char * const watched = std::getenv(WATCH_ENVIRONMENT)) {
        start_watching(watched);
    }
    const char * const control = std::getenv(CONTROL_ENVIRONMENT);
    const Given environment = given_by_environment(), arguments = given_by_command_line();
    if (!environment.is && !arguments.is && !control) {
        return;
    }
    if (environment.is && arguments.is && !same_counts(environment, arguments)) {
        refuse("the command line asks for " + schedule_text(arguments.schedule) + " and " + ENVIRONMENT + " for " +
               schedule_text(environment.schedule) + ": take one of them away");
    }
    if (control) {
        state().control.path = control;
    }
    state().schedule = arguments.is ? arguments.schedule : environment.schedule;
    state().announce = state().schedule != nullptr;
    state().by_command_line = arguments.is;
    state().source = arguments.is ? "command line" : environment.is ? "environment" : "nothing";
    if (dlsym(RTLD_DEFAULT, "llama_decode") && !resolve_from(RTLD_NEXT)) {
        refuse(std::string(arguments.is ? KEY : environment.is ? ENVIRONMENT : CONTROL_ENVIRONMENT) +
               " is set, but the libllama of this program does not have both functions that the expert override "
               "replaces (llama.cpp from September 2026 on, as a shared library, has them)");
    }
}

} // namespace

// ---- the two symbols ------------------------------------------------------------------------------------------------

uint32_t llama_hparams::n_expert_used(uint32_t il) const {
    const auto original = original_n_expert_used(__builtin_return_address(0));
    Building * const inside = building && building->block == static_cast<int>(il) ? building : nullptr;
    if (!inside) {
        return own_count = original(this, il);
    }
    const uint32_t answer = inside->count ? inside->count : original(this, il);
    inside->summed = answer;
    return answer;
}

ggml_tensor * llm_graph_context::build_moe_ffn(
        ggml_tensor * cur, ggml_tensor * gate_inp, ggml_tensor * gate_inp_b, ggml_tensor * up_exps,
        ggml_tensor * up_exps_b, ggml_tensor * gate_exps, ggml_tensor * gate_exps_b, ggml_tensor * down_exps,
        ggml_tensor * down_exps_b, ggml_tensor * exp_probs_b, int64_t n_expert, int64_t n_expert_used,
        llm_ffn_op_type type_op, bool norm_w, float w_scale, llama_expert_gating_func_type gating_op, int il,
        ggml_tensor * probs_in, ggml_tensor * gate_up_exps, ggml_tensor * gate_up_exps_b, ggml_tensor * up_exps_s,
        ggml_tensor * gate_exps_s, ggml_tensor * down_exps_s, ggml_tensor * selected_experts_in) const {
    const auto original = original_build_moe_ffn(__builtin_return_address(0));
    const Rows rows_of = state().rows_of;
    enter_block(this, il, rows_of ? rows_of(cur) : 0);
    const auto schedule = graph.schedule; // kept alive for the whole build, whoever sets another one meanwhile
    Building here{il, substitute(schedule.get(), il, n_expert, n_expert_used, selected_experts_in != nullptr), -1};
    if (here.count) {
        announce_once();
    }
    const int64_t selected = here.count ? here.count : n_expert_used;
    const Scope scope(here);
    ggml_tensor * const out = original(
        this, cur, gate_inp, gate_inp_b, up_exps, up_exps_b, gate_exps, gate_exps_b, down_exps, down_exps_b,
        exp_probs_b, n_expert, selected, type_op, norm_w, w_scale, gating_op, il, probs_in, gate_up_exps,
        gate_up_exps_b, up_exps_s, gate_exps_s, down_exps_s, selected_experts_in);
    record(il, Built{n_expert_used, selected, here.summed}, n_expert);
    return out;
}

// ---- C interface ----------------------------------------------------------------------------------------------------

extern "C" {

// Takes the originals from the loaded library at `path`. 0: done; 1: `error` says why not.
EXPORTED int routing_lab_bind(const char * path, char * error, size_t size) {
    void * const handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) {
        copy_text(std::string(path) + " is not loaded", error, size);
        return 1;
    }
    const bool found = resolve_from(handle);
    dlclose(handle);
    {
        const std::lock_guard<std::mutex> lock(state().mutex);
        state().bound = true;
    }
    if (!found) {
        copy_text(std::string(path) + " does not have both functions that the expert override replaces", error, size);
    }
    return found ? 0 : 1;
}

// Sets the schedule for every graph built from now on; an empty text returns to the model's own counts.
// 0: done; 1: `error` says what is wrong, and the schedule stays as it was.
EXPORTED int routing_lab_set(const char * text, char * error, size_t size) {
    std::shared_ptr<const Schedule> schedule;
    try {
        schedule = *text ? parse_schedule(text) : nullptr;
    } catch (const std::invalid_argument & problem) {
        copy_text(problem.what(), error, size);
        return 1;
    }
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().schedule = std::move(schedule);
    state().announce = false;
    state().bound = true;
    return 0;
}

// What graphs were built with since the last reset, one line "block asked selected summed" for each block (its last
// build). Returns the length of the whole text without its end mark; call again with more room when it is >= size.
EXPORTED size_t routing_lab_report(char * buffer, size_t size) {
    std::string text;
    const std::lock_guard<std::mutex> lock(state().mutex);
    for (const auto & [block, built] : state().built) {
        text += std::to_string(block) + ' ' + std::to_string(built.asked) + ' ' + std::to_string(built.selected) + ' ' +
                std::to_string(built.summed) + '\n';
    }
    copy_text(text, buffer, size);
    return text.size();
}

EXPORTED void routing_lab_reset_report() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().built.clear();
}

} // extern "C"
