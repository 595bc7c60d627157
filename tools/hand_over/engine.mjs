// Answers requests about a GGUF file with node-llama-cpp: one JSON object in a line, one in the
// answer. Arguments: the folder with node_modules, the file, and the tokens of the context.
import {createInterface} from "node:readline";
import {statSync} from "node:fs";
import {join, resolve} from "node:path";
import {pathToFileURL} from "node:url";

const [, , folder, file, size] = process.argv;
const library = join(resolve(folder), "node_modules", "node-llama-cpp", "dist", "index.js");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(library).href);
const llama = await getLlama({
    gpu: false, build: "never", progressLogs: false, logLevel: LlamaLogLevel.fatal
});
const model = await llama.loadModel({modelPath: resolve(file), gpuLayers: 0});
// Threads wait for each other by spinning after each layer, which takes longer than a small one.
const threads = statSync(file).size < 1e8 ? {threads: 1} : {};
// A cache in 16 bits would round differently than transformers does.
const context = await model.createContext({
    contextSize: Number(size), sequences: 1, flashAttention: false, ...threads,
    experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"
});
const sequence = context.getSequence();

async function complete({ids, count}) {
    const tokens = [];
    await sequence.clearHistory();
    for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
        if (model.isEogToken(token))
            return {tokens, stopped: true, text: model.detokenize(tokens)};
        tokens.push(token);
        if (tokens.length === count)
            break;
    }
    return {tokens, stopped: false, text: model.detokenize(tokens)};
}

const operations = {
    describe: () => ({
        metadata: {general: model.fileInfo.metadata.general, tokenizer: {
            chat_template: model.fileInfo.metadata.tokenizer?.chat_template
        }},
        adds_bos: model.tokens.shouldPrependBosToken, bos: model.tokens.bos
    }),
    tokenize: ({text}) => ({ids: model.tokenize(text, true)}),
    complete
};
for await (const line of createInterface({input: process.stdin})) {
    const request = JSON.parse(line);
    process.stdout.write(JSON.stringify(await operations[request.operation](request)) + "\n");
}
process.exit(0);
